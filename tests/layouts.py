"""Small files in integers for the tests of additions: builders, and layouts as text."""

from onnx_sublinear.passes.barriers import Added, Rules
from onnx_sublinear.runtime_model import Kernel, RuntimeGraph

X, W = 0, 1


def line(reads_of, *, outputs=(), size=128, late=()):
    """Kernel k reads `reads_of[k]` and makes value k + 2; values 0 and 1 are graph inputs."""
    graph = RuntimeGraph()
    graph.add_value("x", 0, 1, shape=1, external=True)
    graph.add_value("w", 0, 1, shape=1, external=True)
    for k, reads in enumerate(reads_of):
        graph.add_value(f"v{k}", size, 1, shape=1, output=k in outputs)
        graph.kernels.append(Kernel(tuple(reads), (k + 2,), late=k in late))
    return graph


def rules(graph, *, probes=False, ranks=None, scalars=None, countable=None, small=(), clones=(), bodies=None):
    """`clones`: kernels, or kernel -> its original (kernel)."""
    count = len(graph.kernels)
    original = dict(clones) if isinstance(clones, dict) else {}
    twins = {**{k: first + 1 for k, first in original.items()}, **{first: first + 1 for first in original.values()}}
    return Rules(
        ranks=ranks or [2] * len(graph.names),
        countable=countable or [True] * len(graph.names),
        slots=[k.reads for k in graph.kernels],
        scalars=scalars or {},
        small_output=[k in small for k in range(count)],
        small_all=[k in small for k in range(count)],
        clone=[k in clones for k in range(count)],
        twins=[twins.get(k, 0) for k in range(count)],
        bodies=bodies or {},
        probes=probes,
        free_source=X,
    )


def rows(layout):
    """The file as text: `v3` for an original node, `kind(source)` for an added one."""
    names = layout.graph.names
    return [f"{r.kind}({names[r.source]})" if isinstance(r, Added) else names[r + 2] for r in layout.rows]


def originals(layout, order):
    """The original kernels in the order in which `order` runs them."""
    return [layout.rows[k] for k in order if isinstance(layout.rows[k], int)]
