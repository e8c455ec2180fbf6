"""Kill ranks of a training by a seeded schedule, and let torchrun restart it.

    python tests/restarts.py pretrain --restarts 20 --seed 0
    python tests/restarts.py trainer torchtitan --restarts 20

The schedule says for every attempt which rank dies, at which step, and whether before the step or
in the middle of writing the checkpoint after it. Rank 0 of each attempt stores its losses. They
must equal the losses of an undisturbed run, the attempt must resume after the newest complete
checkpoint, and no process, shared memory or unfinished file may be left.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RANKS, EVERY = 2, 2  # steps between checkpoints
LIMIT = 120.0  # seconds per attempt; reached only by a job that hangs
NAME = "ULTRAEP_TEST_RESTARTS"  # environment variable that marks all processes of a run
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/reliability.md
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode, every attempt compiles torch again
    "OMP_NUM_THREADS": "1",
}
PRETRAIN = {
    "model.hidden": 16,
    "model.ffn": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.experts": 8,
    "training.batch": 8,
    "training.length": 32,
    "training.warmup": 2,
    "evaluation.windows": 4,
    "checkpoints.every": EVERY,
    "logging.every": 1,
}


class Kill(NamedTuple):
    """When a rank kills itself. `save`: in this call of `torch.save` after the step; -1: before."""

    rank: int
    step: int
    save: int


def schedule(seed: int, restarts: int, steps: int, writers: int, saves: int) -> list[Kill]:
    """Draw one kill per attempt, each later than the checkpoint from which the attempt resumes.

    writers: ranks that write checkpoints; saves: how often each of them calls `torch.save`.
    """
    rng, kills, done = random.Random(seed), [], 0
    for _ in range(restarts):
        if rng.random() < 0.5:
            step = done + EVERY
            kills.append(Kill(rng.randrange(writers), step, rng.randrange(saves)))
        else:
            step = min(done + rng.randint(1, EVERY + 1), steps)
            kills.append(Kill(rng.randrange(RANKS), step, -1))
            done = (step - 1) // EVERY * EVERY
    return kills


def resumed_steps(kills: list[Kill]) -> list[int]:
    """Return the first step of every attempt."""
    first = [1]
    for kill in kills:
        before = kill.step - 1 if kill.save < 0 else kill.step - EVERY
        first.append(before // EVERY * EVERY + 1)
    return first


# One rank.


class Victim:
    """Kills this rank by the schedule and stores the losses of rank 0."""

    def __init__(self, folder: Path, kills: list[Kill]) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.rank = int(os.environ["RANK"])
        self.kill = kills[attempt] if attempt < len(kills) else None
        self.step = self.saves = 0
        with (folder / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.log = (folder / f"losses-{attempt}").open("a")
        import torch

        self.plain, torch.save = torch.save, self._save

    def begin(self, step: int) -> None:
        """Note that a step begins; die here if the schedule says so."""
        self.step, self.saves = step, 0
        if self._due(step) and self.kill.save < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, step: int, loss: float) -> None:
        if self.rank == 0:
            print(step, float(loss).hex(), file=self.log, flush=True)

    def _due(self, step: int) -> bool:
        return self.kill is not None and (self.kill.rank, self.kill.step) == (self.rank, step)

    def _save(self, content: Any, target: Any, *args: Any, **options: Any) -> None:
        if self._due(self.step) and self.kill.save == self.saves:
            half_written(self.plain, content, target)
            os.kill(os.getpid(), signal.SIGKILL)
        self.saves += 1
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


def pretrain(victim: Victim, folder: Path, steps: int) -> None:
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
    own |= {"training.steps": steps, "evaluation.every": steps}
    listed = [f"{name}={value}" for name, value in (PRETRAIN | own).items()]
    argv = ["--elastic", "--no-tensorboard"]
    for item in listed:
        argv += ["--set", item]
    sys.exit(module.main(argv))


def trainer(victim: Victim, folder: Path, steps: int) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]
    import torch
    from families import VOCABULARY, build
    from transformers import TrainerCallback, TrainingArguments
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
    arguments = TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=2,
        max_steps=steps,
        save_steps=EVERY,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=3e-3,
        max_grad_norm=0.3,
        seed=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = build("mixtral")
    balance(model)
    rows = torch.randint(3, VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(3))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    training = BalancedTrainer(
        model=model, args=arguments, train_dataset=samples, callbacks=[Steps()]
    )
    training.train(resume_from_checkpoint=get_last_checkpoint(str(run)))
    torch.distributed.destroy_process_group()


def torchtitan(victim: Victim, folder: Path, steps: int) -> None:
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
    config = tiny.tiny(balanced, steps=steps, folder=str(folder / "run"))
    config.training.seq_len = 32
    for name, value in {"enable": True, "interval": EVERY, "last_save_model_only": False}.items():
        setattr(config.checkpoint, name, value)
    training = config.build()
    training.metrics_processor.logger = Logger()
    training.train()
    training.close()


class Job(NamedTuple):
    """A training: one rank of it, how many ranks write its checkpoints, and how they look."""

    run: Callable[[Victim, Path, int], None]
    writers: int
    saves: int  # calls of `torch.save` for a checkpoint, at least
    checkpoints: str  # below its folder
    last: str  # the part that is written last; "": a checkpoint is one file
    unfinished: str  # what only a killed rank leaves


JOBS = {
    "pretrain": Job(pretrain, 1, 1, "step-*.pt", "", ".*.tmp"),
    "trainer": Job(trainer, 2, 3, "checkpoint-*", "trainer_state.json", ".unfinished"),
    "torchtitan": Job(torchtitan, 2, 3, "checkpoint/step-*", ".metadata", "*.tmp"),
}


def work(name: str, folder: str, steps: int, kills: list[tuple[int, int, int]]) -> None:
    """Run one rank of a job."""
    import torch

    torch.set_num_threads(1)
    victim = Victim(Path(folder), [Kill(*kill) for kill in kills])
    JOBS[name].run(victim, Path(folder), steps)


# All ranks, under torchrun.


class Report(NamedTuple):
    """A run that was checked."""

    kills: list[Kill]
    steps: int
    repeated: int  # steps that ran more than once
    seconds: float


Launch = Callable[[str, Path, int, list[Kill]], None]


def warm_ranks(name: str, folder: Path, steps: int, kills: list[Kill]) -> None:
    """Run and restart a job as torchrun does, in processes that have already imported torch."""
    import warm

    for attempt in range(len(kills) + 1):
        job = (name, str(folder), steps, kills)
        ranks = warm.start_ranks(RANKS, work, *job, TORCHELASTIC_RESTART_COUNT=str(attempt))
        running = {rank.process.sentinel: rank.process for rank in ranks}
        while running:
            ended = [running.pop(sentinel) for sentinel in wait(list(running), LIMIT)]
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.kill()
        last = [rank.finish() for rank in ranks]
    assert not any(rank.returncode for rank in last), "".join(rank.stderr for rank in last)[-4000:]


def torchrun(name: str, folder: Path, steps: int, kills: list[Kill]) -> None:
    """Run a job under torchrun, as a user would."""
    options = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={len(kills)}"]
    options += ["--monitor-interval=0.1", __file__, name, "--rank-of", str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--steps", str(steps), "--kills", json.dumps(kills)]
    with (folder / "output").open("w") as output:
        limit = LIMIT * (len(kills) + 1)
        done = subprocess.run(
            command, stdout=output, stderr=output, timeout=limit, env=os.environ | ENVIRONMENT
        )
    assert done.returncode == 0, (folder / "output").read_text()[-4000:]


def check(
    name: str, seed: int, restarts: int, *, steps: int = 8, launch: Launch = torchrun
) -> Report:
    """Run a job twice, undisturbed and with kills, and compare all losses."""
    import warm

    job, began = JOBS[name], time.perf_counter()
    kills = schedule(seed, restarts, steps, job.writers, job.saves)
    warm.start_server()  # before `attempts` marks its processes
    with tempfile.TemporaryDirectory() as root:
        expected = attempts(warm_ranks, name, Path(root) / "whole", steps, [])[0]
        assert sorted(expected) == list(range(1, steps + 1))
        logged = attempts(launch, name, Path(root) / "killed", steps, kills)
    assert len(logged) == restarts + 1
    assert max(logged[-1]) == steps
    for first, losses in zip(resumed_steps(kills), logged, strict=True):
        assert not losses or min(losses) == first, f"resumed at {min(losses)}, not at {first}"
        for step, loss in losses.items():
            assert loss == expected[step], f"step {step}: {loss}, not {expected[step]}"
    repeated = sum(map(len, logged)) - steps
    return Report(kills, steps, repeated, time.perf_counter() - began)


def attempts(
    launch: Launch, name: str, folder: Path, steps: int, kills: list[Kill]
) -> list[dict[int, float]]:
    """Return the losses of every attempt by step; assert that nothing is left."""
    folder.mkdir()
    mark = f"{NAME}={uuid.uuid4().hex}"
    variable, _, value = mark.partition("=")
    os.environ[variable] = value
    try:
        launch(name, folder, steps, kills)
    finally:
        del os.environ[variable]
    assert processes(mark) == []
    pids = (folder / "pids").read_text().split()
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    left = [name for name in shared if any(pid in name.split("-") for pid in pids)]
    left += [str(path) for path in (folder / "run").rglob(JOBS[name].unfinished)]
    assert left == []
    checkpoints = list((folder / "run").glob(JOBS[name].checkpoints))
    assert checkpoints
    for path in checkpoints:
        assert (path / JOBS[name].last).exists() if JOBS[name].last else is_whole(path), path
    losses = []
    for attempt in range(len(kills) + 1):
        lines = map(str.split, (folder / f"losses-{attempt}").read_text().splitlines())
        losses.append({int(step): float.fromhex(loss) for step, loss in lines})
    return losses


def is_whole(path: Path) -> bool:
    with zipfile.ZipFile(path) as file:  # the format of `torch.save`
        return file.testzip() is None


def processes(mark: str) -> list[int]:
    """Return the processes of a run that still exist."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            own = folder.name.isdigit() and int(folder.name) != os.getpid()
            if own and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="+", choices=JOBS)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--kills", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        work(args.jobs[0], args.rank_of, args.steps, json.loads(args.kills))
        return
    for name in args.jobs:
        report = check(name, args.seed, args.restarts, steps=args.steps)
        print(f"{name}: {len(report.kills)} restarts, seed {args.seed}, {report.steps} steps")
        for number, kill in enumerate(report.kills, start=1):
            when = "before" if kill.save < 0 else f"in write {kill.save} of the checkpoint after"
            first = resumed_steps(report.kills)[number]
            print(
                f"  {number:>2}  rank {kill.rank} killed {when} step {kill.step}: "
                f"resumed at step {first}"
            )
        print(
            f"  all losses equal the undisturbed run bit for bit, {report.repeated} steps twice "
            f"or more; no process, shared memory or unfinished file left; {report.seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
