"""Jobs whose ranks kill themselves, and torchrun, which restarts them.

One rank dies before step 3, and one in the middle of writing the checkpoint of step 4. Rank 0 of
each attempt stores its losses. They must equal the losses of an undisturbed run bit for bit, the
attempt must resume after the newest complete checkpoint, and no process, shared memory or
unfinished file may be left.
"""

import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY = 6, 2  # steps of a job, and between checkpoints
LIMIT = 400.0  # seconds; reached only by a job that hangs
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/reliability.md
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode, every attempt compiles torch again
    "OMP_NUM_THREADS": "1",
}
PRETRAIN = {"model.hidden": 16, "model.ffn": 32, "model.layers": 2, "model.heads": 2}
PRETRAIN |= {"model.experts": 8, "training.batch": 8, "training.length": 32, "training.warmup": 2}
PRETRAIN |= {"evaluation.windows": 4, "checkpoints.every": EVERY, "logging.every": 1}


class Kill(NamedTuple):
    """When a rank kills itself: before a step, or while it writes the checkpoint after it."""

    rank: int
    step: int
    writing: bool


KILLS = [Kill(1, 3, writing=False), Kill(0, 4, writing=True)]
FIRST_STEPS = [1, 3, 3]  # of every attempt


class Victim:
    """Kills this rank and stores the losses of rank 0."""

    def __init__(self, folder: Path, kills: list[Kill]) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.rank, self.step = int(os.environ["RANK"]), 0
        self.kill = kills[attempt] if attempt < len(kills) else None
        with (folder / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.log = (folder / f"losses-{attempt}").open("a")
        import torch

        self.plain, torch.save = torch.save, self._save

    def begin(self, step: int) -> None:
        """Note that a step begins; die here if it is time."""
        self.step = step
        if self.kill == Kill(self.rank, step, writing=False):
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, step: int, loss: float) -> None:
        if self.rank == 0:
            print(step, float(loss).hex(), file=self.log, flush=True)

    def _save(self, content: Any, target: Any, *args: Any, **options: Any) -> None:
        if self.kill == Kill(self.rank, self.step, writing=True):
            half_written(self.plain, content, target)
            os.kill(os.getpid(), signal.SIGKILL)
        self.plain(content, target, *args, **options)


def half_written(save: Callable[..., None], content: Any, target: Any) -> None:
    whole = io.BytesIO()
    save(content, whole)
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    if isinstance(target, (str, os.PathLike)):
        Path(target).write_bytes(half)
    else:
        target.write(half)
        target.flush()


def pretrain(victim: Victim, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    module = import_module("pretrain")
    plain = module.Pretraining.step

    def step(self: Any, stop: bool) -> dict[str, float]:
        victim.begin(self.done + 1)
        values = plain(self, stop)
        victim.loss(self.done, values["loss"])
        return values

    module.Pretraining.step = step
    own = {"checkpoints.folder": folder / "run", "logging.folder": folder / "run"}
    own |= {"training.steps": STEPS, "evaluation.every": STEPS}
    listed = [f"{name}={value}" for name, value in (PRETRAIN | own).items()]
    argv = ["--elastic", "--no-tensorboard"]
    for item in listed:
        argv += ["--set", item]
    sys.exit(module.main(argv))


def trainer(victim: Victim, folder: Path) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]
    import torch
    from families import build, samples, training_arguments
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    from ultraep.integrations.transformers import BalancedTrainer, balance

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            victim.begin(state.global_step + 1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                victim.loss(state.global_step, logs["loss"])

    run = folder / "run"
    run.mkdir(exist_ok=True)
    saving = {"save_strategy": "steps", "save_steps": EVERY, "save_total_limit": 2}
    arguments = training_arguments(run, 2, max_steps=STEPS, **saving)
    model = build("mixtral")
    balance(model)
    training = BalancedTrainer(
        model=model, args=arguments, train_dataset=samples(), callbacks=[Steps()]
    )
    training.train(resume_from_checkpoint=get_last_checkpoint(str(run)))
    torch.distributed.destroy_process_group()


def torchtitan(victim: Victim, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    tiny = import_module("torchtitan_tiny")
    from torchtitan.trainer import Trainer

    plain = Trainer.train_step

    def train_step(self: Any, batches: Any) -> Any:
        victim.begin(self.step)
        return plain(self, batches)

    class Logger(tiny.BaseLogger):
        def log(self, metrics: dict[str, float], step: int) -> None:
            victim.loss(step, metrics["loss_metrics/global_avg_loss"])

    Trainer.train_step = train_step
    tiny.dist.init_process_group("gloo")
    balanced = (f"{tiny.OVERRIDES}.balanced", {"slots": 1})
    config = tiny.tiny(balanced, steps=STEPS, folder=str(folder / "run"))
    config.training.seq_len = 32
    for name, value in {"enable": True, "interval": EVERY, "last_save_model_only": False}.items():
        setattr(config.checkpoint, name, value)
    training = config.build()
    training.metrics_processor.logger = Logger()
    training.train()
    training.close()


class Job(NamedTuple):
    """A training: one rank of it, and how its checkpoints look."""

    run: Callable[[Victim, Path], None]
    checkpoints: str  # below its folder
    last: str  # the part that is written last; "": a checkpoint is one file
    unfinished: str  # what only a killed rank leaves


JOBS = {
    "pretrain": Job(pretrain, "step-*.pt", "", ".*.tmp"),
    "trainer": Job(trainer, "checkpoint-*", "trainer_state.json", ".unfinished"),
    "torchtitan": Job(torchtitan, "checkpoint/step-*", ".metadata", "*.tmp"),
}


def work(name: str, folder: Path, kills: list[Kill]) -> None:
    import torch

    torch.set_num_threads(1)
    JOBS[name].run(Victim(folder, kills), folder)


def check(name: str, root: Path) -> None:
    """Run a job twice, undisturbed and with kills, and compare all losses."""
    (expected,) = attempts(name, root / "whole", 0)
    assert sorted(expected) == list(range(1, STEPS + 1))
    logged = attempts(name, root / "killed", len(KILLS))
    assert max(logged[-1]) == STEPS
    for first, losses in zip(FIRST_STEPS, logged, strict=True):
        assert not losses or min(losses) == first, f"resumed at {min(losses)}, not at {first}"
        assert losses == {step: expected[step] for step in losses}


def attempts(name: str, folder: Path, restarts: int) -> list[dict[int, float]]:
    folder.mkdir()
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    options += ["--monitor-interval=0.1", __file__, name, str(folder), str(restarts)]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, timeout=LIMIT, env=os.environ | ENVIRONMENT
        )
    assert done.returncode == 0, (folder / "output").read_text()[-4000:]
    job, pids = JOBS[name], (folder / "pids").read_text().split()
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    left = [name for name in shared if any(pid in name.split("-") for pid in pids)]
    assert left + list((folder / "run").rglob(job.unfinished)) == []
    checkpoints = list((folder / "run").glob(job.checkpoints))
    assert checkpoints
    for path in checkpoints:
        assert (path / job.last).exists() if job.last else is_whole(path), path
    losses = []
    for attempt in range(restarts + 1):
        lines = map(str.split, (folder / f"losses-{attempt}").read_text().splitlines())
        losses.append({int(step): float.fromhex(loss) for step, loss in lines})
    return losses


def is_whole(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:  # the format of `torch.save`
        return file.testzip() is None


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), KILLS[: int(sys.argv[3])])
