"""Draw plan.svg: the rows of 64 ranks before and after planning, for light and dark pages.

Run it from the root of the repository: python docs/pictures/plan.py
"""

from pathlib import Path

import ultraep

WIDTH, HEIGHT, GAP, LEFT, TOP = 400, 200, 60, 46, 44
ABOVE, BELOW, REPLICA = "#d1495b", "#3b6ea5", "#edae49"
STYLE = """<style>
.paper { fill: white } .title { fill: #222 } .small { fill: #555 } .line { stroke: #222 }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } .title { fill: #e6edf3 } .small { fill: #9da7b3 } .line { stroke: #e6edf3 }
}
</style>"""


def bars(values, limit, left, colours):
    """One panel: for every rank a stack of (tokens, colour), as rectangles."""
    step = WIDTH / len(values)
    shapes = []
    for rank, stack in enumerate(values):
        y = TOP + HEIGHT
        for tokens, colour in zip(stack, colours, strict=True):
            height = tokens / limit * HEIGHT
            y -= height
            x = left + rank * step
            shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
    return "\n".join(shapes)


def frame(title, left, mean, limit):
    level = TOP + HEIGHT - mean / limit * HEIGHT
    return f"""<text x="{left}" y="{TOP - 16}" font-size="15" class="title">{title}</text>
<line x1="{left}" x2="{left + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" class="line" stroke-dasharray="4 3"/>
<line x1="{left}" x2="{left + WIDTH}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}" class="line"/>
<text x="{left}" y="{TOP + HEIGHT + 18}" font-size="12" class="small">rank 0</text>
<text x="{left + WIDTH}" y="{TOP + HEIGHT + 18}" font-size="12" class="small" text-anchor="end">rank 63</text>"""


def main():
    loads = ultraep.workload.zipf(64, 256, ratio=3.0, shuffled=True, seed=0)
    plan = ultraep.plan(loads, ultraep.Topology(ranks=64, experts=256, slots=1))
    before, mean = plan.initial_rank_loads, plan.total / 64
    copied = plan.dense_quota()
    copied[range(256), plan.topology.home_of_expert] = 0
    copied = copied.sum(axis=0)
    limit = before.max() * 1.05
    left, right = LEFT, LEFT + WIDTH + GAP
    over = [(min(load, mean), max(0, load - mean)) for load in before]
    served = list(zip(plan.rank_loads - copied, copied, strict=True))
    level = TOP + HEIGHT - mean / limit * HEIGHT
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + WIDTH + 20} {TOP + HEIGHT + 52}" font-family="sans-serif">
{STYLE}
<rect width="100%" height="100%" class="paper"/>
<text x="{LEFT - 6}" y="{level + 4:.1f}" font-size="12" class="small" text-anchor="end">mean</text>
{bars(over, limit, left, (BELOW, ABOVE))}
{frame(f"before: busiest rank {plan.initial_imbalance:.2f} x mean", left, mean, limit)}
{bars(served, limit, right, (BELOW, REPLICA))}
{frame(f"after: {plan.imbalance:.3f} x mean, {plan.num_replicas} replicas, at most one per rank", right, mean, limit)}
<text x="{left}" y="{TOP + HEIGHT + 42}" font-size="12" fill="{ABOVE}">rows above the mean; synthetic Zipf loads, 256 experts</text>
<text x="{right}" y="{TOP + HEIGHT + 42}" font-size="12" fill="#b07a10">rows served by a replica of an expert from another rank</text>
</svg>
"""
    Path(__file__).with_suffix(".svg").write_text(svg)


if __name__ == "__main__":
    main()
