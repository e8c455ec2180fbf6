import sys, time, json, os, subprocess, gc
from dataclasses import replace
import numpy as np, torch
from timing import Gpu, on_gpu, free
on_gpu(toy=False)
from grouped_mlp import DEEPSEEK, QWEN3, Mlp
from world import split, graph_on, together
from bench_layer_gpu import SIZES, LOADS, plan_for, World, LayerRank, before
import bench_layer_gpu as blg
from load_cases import ids_with, even
from ultraep import Topology, BalanceConfig
import ultraep
OUT = os.environ.get("OUT", "/tmp")

def tables():
    from ultraep.backends.triton.grouped import TABLES, Grouped
    import probe_old, probe_drawn
    def change(table, **kw):
        return {**table, **{k: replace(b, **kw) for k, b in table.items() if k[1] == 2 and b.depth}}
    new, old, drawn = TABLES["cuda"], probe_old.TABLES["cuda"], probe_drawn.TABLES["cuda"]
    return {
        "old": (probe_old.Grouped, old),
        "oldnoh": (probe_old.Grouped, change(old, half=False)),
        "drawnnoh": (probe_drawn.Grouped, change(drawn, half=False)),
        "new": (Grouped, new),
        "new4": (Grouped, change(new, stages=4)),
        "newband6": (Grouped, change(new, band=6)),
    }

KERNELS = ("lay+gate_up", "swiglu", "down", "lay+d_hidden", "swiglu_b", "d_down", "d_gate_up", "d_rows")

def calls(m, cls, table, mark):
    g = cls(m._offsets, programs=m._sms, table=table)
    mark()
    g.multiply(m._rows_AD, m._gate_up, m._up); mark()
    g.swiglu(m._up, m._hidden_AF); mark()
    g.multiply(m._hidden_AF, m._down, m._served_AD, scale=m._scale_A); mark()
    g = cls(m._offsets, programs=m._sms, table=table)
    h = m._hidden_AF
    g.multiply_transposed(m._d_out_AD, m._down, h); mark()
    g.swiglu_backward(m._up, h, m._d_up, hidden=h, scale=m._scale_A, d_scale=m._d_scale_A); mark()
    g.weight_gradients(m._d_out_AD, h, m._d_down, scale=m._scale_A); mark()
    g.weight_gradients(m._d_up, m._rows_AD, m._d_gate_up); mark()
    g.multiply_transposed(m._d_up, m._gate_up, m._served_AD); mark()

def topk_ids(size, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(size.tokens, size.experts, generator=g, device="cuda").topk(size.top_k).indices.int()

def tile_ids(size, seed):
    rng = np.random.default_rng(seed)
    E, K = size.experts, size.top_k
    out = []
    for _ in range(size.tokens // E):
        order, steps = rng.permutation(E), rng.permutation(E)[:K]
        out.append(order[(np.arange(E)[:, None] + steps[None]) % E])
    return torch.from_numpy(np.concatenate(out).astype(np.int32))

def divisions(size):
    R, E = size.ranks, size.experts
    found = {"tile": [[size.rows // (E // R)] * (E // R) + [0]] * R}
    loads = np.stack([np.bincount(topk_ids(size, r).flatten().cpu().numpy(), minlength=E) for r in range(R)]).sum(0)
    found["random"] = [[*loads.reshape(R, -1)[r].tolist(), 0] for r in range(R)]
    for load in (LOADS[1], LOADS[3]):
        drawn, plan = plan_for(size, load, "ultraep")
        rest = drawn.sum(0).astype(int).copy(); spare = [0] * R
        for (e, r, _), q in zip(plan.replicas, plan.quotas):
            rest[e] -= q; spare[r] += int(q)
        found[load.name] = [[*rest.reshape(R, -1)[r].tolist(), spare[r]] for r in range(R)]
    return found

def products(size, model, variants, rounds):
    from stamp import write_time
    clock = Gpu(); parts = split(size.ranks, size.sms); streams = [p.stream() for p in parts]
    divs = divisions(size); most = max(sum(r) for d in divs.values() for r in d)
    mlps = [Mlp(model, size.experts // size.ranks + 1, most, clock, sms=p.sms, seed=i) for i, p in enumerate(parts)]
    made = {}
    checks = {}
    for m, rows in zip(mlps, divs["random"]): m.divide(rows)
    for name in variants:
        cls, table = tables()[name]
        calls(mlps[0], cls, table, lambda: None)
        torch.cuda.synchronize()
        checks[name] = [t.clone() for t in (mlps[0]._up, mlps[0]._served_AD, mlps[0]._d_gate_up.homes[0], mlps[0]._d_down.homes[3])]
        same = [torch.equal(a, b) for a, b in zip(checks[variants[0]], checks[name])]
        print("bits as", variants[0], name, same, flush=True)
        graphs, stamps = [], []
        for m, s in zip(mlps, streams):
            st = torch.zeros(32, dtype=torch.int64, device="cuda"); n = [0]
            def mark():
                write_time[(1,)](st, n[0], num_warps=1); n[0] += 1
            mark(); torch.cuda.synchronize(); n[0] = 0
            graphs.append(graph_on(s, lambda: calls(m, cls, table, mark))); stamps.append(st)
        made[name] = graphs, stamps
    checks.clear()
    found = {}
    def replay(name, div):
        for m, rows in zip(mlps, divs[div]): m.divide(rows)
        torch.cuda.synchronize()
        graphs, stamps = made[name]
        together([g.replay for g in graphs], streams)
        torch.cuda.synchronize()
        t = torch.stack(stamps).cpu().numpy()[:, :len(KERNELS) + 1] / 1e6
        return np.diff(t, axis=1)
    for _ in range(8): replay(variants[0], "tile")
    for rnd in range(rounds):
        turns = [(name, div) for name in variants for div in divs]
        for turn in np.random.default_rng(rnd).permutation(len(turns)):
            found.setdefault(turns[turn], []).append(replay(*turns[turn]))
    import pickle; pickle.dump(found, open(f"{OUT}/{model.name}.pkl", "wb"))
    print(f"\n{size.model}: ms, mean of ranks, median of {rounds}; total: slowest rank")
    print("variant  division            " + " ".join(f"{k:>12s}" for k in KERNELS) + "   sum   slowest  over tile")
    for name in variants:
        base = None
        for div in divs:
            t = np.median(np.stack(found[name, div]), axis=0)
            mean, total = t.mean(0), np.median([x.sum(1).max() for x in found[name, div]])
            base = base or total
            print(f"{name:8s} {div:20s}" + " ".join(f"{v:12.3f}" for v in mean) + f" {mean.sum():8.2f} {total:8.2f} {total/base:7.4f}")
    return found

def layers(size, rounds):
    from ultraep.runtime.mapped.peers import LocalPeers
    world = World(size)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=0)
    plan = ultraep.plan(even(size), topology, BalanceConfig(policy="none"))
    cap = -(-int(plan.rank_loads.max() * 1.02) // 256) * 256
    ids = {
        "tile, ordered": [ids_with(even(size)[r], size, seed=r).cuda() for r in range(size.ranks)],
        "tile, any": [tile_ids(size, r).cuda() for r in range(size.ranks)],
        "random": [topk_ids(size, r) for r in range(size.ranks)],
    }
    def staged(world, names):
        for r, i in zip(world.ranks, ids[names[0]]): r.router.ids.copy_(i)
        world.capture(); world.replay(); world.check()
        clocks = [blg.StageClock.on_device() for _ in world.ranks]
        for rank, clock in zip(world.ranks, clocks): rank.capture(clock)
        torch.cuda.synchronize()
        if not rounds: return
        found = {n: [] for n in names}; wall = {n: [] for n in names}
        for k in range(rounds + 3):
            for n in names:
                for r, i in zip(world.ranks, ids[n]): r.router.ids.copy_(i)
                torch.cuda.synchronize()
                torch.cuda._sleep(20_000_000)
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(); world.replay(); b.record(); world.check()
                if k >= 3:
                    found[n].append([c.times() for c in clocks]); wall[n].append(a.elapsed_time(b))
        for n in names:
            stages = {s: (np.median([np.mean([t[s] for t in f]) for f in found[n]]), np.median([np.max([t[s] for t in f]) for f in found[n]])) for s in found[n][0][0]}
            print(f"\n{size.model} {n}: {np.median(wall[n]):.2f} ms")
            for s, (a, b) in stages.items():
                if a > .05: print(f"   {s:36s} {a:8.3f} {b:8.3f}")
    import ultraep.backends.triton.exchange as ex
    load = LOADS[1]
    drawn, hot = plan_for(size, load, "ultraep")
    ids["hot 2"] = [ids_with(drawn[r], size, seed=r).cuda() for r in range(size.ranks)]
    for by in (0, 16):
        ex.BY_TOKENS = by
        print("\nby tokens", by)
        world.regroup(plan, cap)
        staged(world, ["tile, ordered", "tile, any", "random"])
        world.regroup(hot, cap)
        staged(world, ["hot 2"])

def matmul():
    a, b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    for _ in range(3): torch.mm(a, b, out=c)
    ev = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    torch.cuda.synchronize()
    for e in ev:
        e.record()
        for _ in range(30): torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    r = [30 * 2 * 8192**3 / x.elapsed_time(y) / 1e9 for x, y in zip(ev, ev[1:])]
    print("torch.mm 8192^3 TFLOP/s over time:", [round(x) for x in r[::4]], flush=True)

def warm(name, model):
    m = Mlp(model, 5, 1024, Gpu(), sms=16)
    m.divide([100, 128, 300, 64, 10])
    calls(m, *tables()[name], lambda: None)
    torch.cuda.synchronize()

if __name__ == "__main__":
    if sys.argv[1] == "warm":
        warm(sys.argv[2], QWEN3 if sys.argv[3] == "q" else DEEPSEEK)
    elif sys.argv[1] == "products":
        t = time.time()
        products(SIZES[0], QWEN3, sys.argv[2].split(","), 4); print("s", time.time() - t); free()
        products(SIZES[1], DEEPSEEK, sys.argv[3].split(","), 4); print("s", time.time() - t)
        matmul()
    elif sys.argv[1] == "layers":
        t = time.time()
        layers(SIZES[0], int(sys.argv[2])); print("s", time.time() - t)
