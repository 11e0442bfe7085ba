"""Small rematerialization problems for the planner tests: hand-made chains and random graphs."""

from hypothesis import strategies as st

from onnx_sublinear.planners.problem import RematProblem


def problem(nodes, *, sizes, kept=(), gradient=(), fixed=(), views=None, inplace=None, costs=None, workspaces=None):
    """A problem from rows (values read, values made); `gradient` and `fixed` (never recomputed) are node numbers."""
    count = range(len(nodes))
    return RematProblem(
        labels=tuple(count),
        reads=tuple(tuple(reads) for reads, _ in nodes),
        writes=tuple(tuple(writes) for _, writes in nodes),
        views=tuple((views or {}).get(n, ()) for n in count),
        inplace=tuple((inplace or {}).get(n, ()) for n in count),
        sizes=tuple(sizes),
        kept=tuple(v in kept for v in range(len(sizes))),
        costs=tuple(costs or (1 for _ in count)),
        workspaces=tuple(workspaces or (0 for _ in count)),
        forward=tuple(n not in gradient for n in count),
        recomputable=tuple(n not in gradient and n not in fixed for n in count),
    )


def chain(sizes, costs=None, fixed=()):
    """Layers y_i = f(y_i-1), then gradients d_i = g(d_i+1, y_i) from the last to the first; d_0 is the output.

    Values: y_0 .. y_n-1, then d_n-1 .. d_0; d_i is as large as y_i.
    """
    n = len(sizes)
    forward = [([i - 1] if i else [], [i]) for i in range(n)]
    gradient = [([n + k - 1, n - 1 - k] if k else [n - 1], [n + k]) for k in range(n)]
    both = [*sizes, *reversed(sizes)]
    costs = costs or [1] * n
    return problem(
        forward + gradient,
        sizes=both,
        kept={2 * n - 1},
        gradient=set(range(n, 2 * n)),
        fixed=fixed,
        costs=[*costs, *(2 * c for c in reversed(costs))],
    )


@st.composite
def problems(draw, *, plain=False, most=12):
    """Random problems: a forward and a gradient part, any fan-out, several outputs a node.

    What shares bytes is of one size.

    `plain`: one output a node, no views, in-place kernels, workspaces, or values that are kept.
    """
    forward = draw(st.integers(1, most))
    count = forward + draw(st.integers(0, most))
    nodes, sizes, views, inplace = [], [], {}, {}
    for n in range(count):
        reads = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3, unique=True)) if sizes else []
        made = 1 if plain else draw(st.integers(1, 2))
        writes = list(range(len(sizes), len(sizes) + made))
        sizes += [draw(st.integers(0, 50)) for _ in range(made)]
        nodes.append((reads, writes))
        kind = draw(st.sampled_from(["view", "inplace", "", ""])) if reads and not plain else ""
        if kind:
            (views if kind == "view" else inplace)[n] = ((reads[0], writes[0]),)
            sizes[writes[0]] = sizes[reads[0]]
    read = {v for reads, _ in nodes for v in reads}
    unread = set(range(len(sizes))) - read
    extra = set() if plain else draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    return problem(
        nodes,
        sizes=sizes,
        kept=set() if plain else unread | extra,
        gradient=set(range(forward, count)),
        fixed=draw(st.sets(st.integers(0, forward - 1), max_size=3)),
        views=views,
        inplace=inplace,
        costs=[draw(st.integers(1, 9)) for _ in nodes],
        workspaces=None if plain else [draw(st.sampled_from([0, 0, 7])) for _ in nodes],
    )
