"""Measures the scratch memory of ONNX Runtime's CPU kernels and compares it with `onnx_sublinear.ops.workspace`.

usage: python benchmarks/workspace.py [--python PYTHON] [--training] [--only TEXT] [--threads N]
       python benchmarks/workspace.py --rates

Each case is a model of one node, run in a fresh process under a malloc tracer (built with gcc): the peak of the
second run, less the outputs, is the scratch. `--training --python PYTHON` measures onnxruntime-training in another
environment. Exit code 1 if a case is off by more than 2 % (or by 8 KiB: blocks below 4 KiB are not traced).
`--rates` prints FLOP/s and bytes/s of a few kernels: the balance that `onnx_sublinear.costs` documents.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TRACER = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
static _Atomic long held, peak;
static void *taken(void *p) {
  long n = p ? (long)malloc_usable_size(p) : 0;
  if (n < 4096) return p;
  long now = atomic_fetch_add(&held, n) + n, seen = atomic_load(&peak);
  while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {}
  return p;
}
static void given(void *p) {
  long n = p ? (long)malloc_usable_size(p) : 0;
  if (n >= 4096) atomic_fetch_sub(&held, n);
}
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
void *malloc(size_t n) { return taken(__libc_malloc(n)); }
void *calloc(size_t a, size_t b) { return taken(__libc_calloc(a, b)); }
void *realloc(void *p, size_t n) { given(p); return taken(__libc_realloc(p, n)); }
void free(void *p) { given(p); __libc_free(p); }
void *memalign(size_t a, size_t n) { return taken(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }
int posix_memalign(void **out, size_t a, size_t n) { return (*out = memalign(a, n)) ? 0 : ENOMEM; }
long trace_peak(void) { return peak; }
long trace_start(void) { atomic_store(&peak, atomic_load(&held)); return held; }
"""

SQUARE, IMAGE, KERNEL = [1024, 1000], [8, 16, 64, 64], [32, 16, 3, 3]
PAD, MS = {"pads": [1, 1, 1, 1]}, "com.microsoft"

# (operator, inputs, attributes, number of outputs[, domain]). An input is a list: the shape of a float tensor; a pair
# (type, shape): a tensor of zeros and ones; a dict: a constant {"type": ..., "value": ...}; None: absent.
CASES = [
    ("Conv", [IMAGE, KERNEL], PAD, 1),
    ("Conv", [IMAGE, [32, 16, 1, 1]], {}, 1),
    ("Conv", [IMAGE, [32, 16, 1, 1]], {"strides": [2, 2]}, 1),
    ("Conv", [[4, 64, 8, 8], [128, 64, 3, 3]], PAD, 1),
    ("Conv", [[4, 64, 8, 8], [256, 32, 3, 3]], {**PAD, "group": 2}, 1),
    ("Conv", [[4, 64, 32, 32], [64, 1, 3, 3]], {**PAD, "group": 64}, 1),
    ("Conv", [[16, 8, 30, 30], [32, 8, 28, 28]], {}, 1),
    ("ConvTranspose", [[8, 32, 64, 64], KERNEL], PAD, 1),
    ("ConvTranspose", [[8, 32, 64, 64], KERNEL], {**PAD, "group": 2}, 1),
    ("ConvTranspose", [[8, 32, 32, 32], KERNEL], {**PAD, "strides": [2, 2], "output_padding": [1, 1]}, 1),
    ("MatMul", [[512, 1024], [1024, 512]], {}, 1),
    ("MatMul", [[4096, 16, 8], [4096, 8, 16]], {}, 1),
    ("MatMul", [[1024, 64, 32], [32, 64]], {}, 1),
    ("Gemm", [[512, 1024], [512, 1024], [1024]], {"transA": 1}, 1),
    ("Softmax", [SQUARE], {"axis": -1}, 1),
    ("Softmax", [[16, 64, 1024]], {"axis": 1}, 1),
    ("LogSoftmax", [SQUARE], {"axis": 0}, 1),
    ("LayerNormalization", [SQUARE, [1000], [1000]], {}, 1),
    ("ReduceSum", [[7, 6000, 110], {"type": "int64", "value": [1]}], {}, 1),
    ("ReduceSum", [[6000, 1100], {"type": "int64", "value": [0]}], {}, 1),
    ("ReduceSum", [[5, 7000, 30, 4], {"type": "int64", "value": [0, 2]}], {}, 1),
    ("ReduceMax", [[3000, 7, 30, 11], {"type": "int64", "value": [1, 3]}], {}, 1),
    ("ReduceSumSquare", [[3000, 20, 30], {"type": "int64", "value": [0, 2]}], {}, 1),
    ("Add", [SQUARE, [1000]], {}, 1),
    ("Erf", [SQUARE], {}, 1),
    ("Sum", [SQUARE] * 3, {}, 1),
    ("Max", [SQUARE, [1000], SQUARE], {}, 1),
    ("Where", [("bool", SQUARE), SQUARE, []], {}, 1),
    ("Where", [("bool", [1, 1000]), SQUARE, []], {}, 1),
    ("Expand", [[20000, 1], {"type": "int64", "value": [20000, 50]}], {}, 1),
    ("Transpose", [SQUARE], {}, 1),
    ("Pad", [IMAGE, {"type": "int64", "value": [0, 0, 1, 1, 0, 0, 1, 1]}], {}, 1),
    ("Gather", [SQUARE, ("int64", [1000])], {}, 1),
    ("GatherElements", [SQUARE, ("int64", SQUARE)], {}, 1),
    ("GatherND", [SQUARE, ("int64", [4096, 1])], {}, 1),
    ("ScatterElements", [SQUARE, ("int64", SQUARE), SQUARE], {}, 1),
    ("ScatterND", [SQUARE, ("int64", [4096, 1]), [4096, 1000]], {}, 1),
    ("MaxPool", [IMAGE], {"kernel_shape": [2, 2]}, 1),
    ("Resize", [IMAGE, None, {"type": "float32", "value": [1, 1, 9, 9]}], {"mode": "linear"}, 1),
    ("TopK", [[10, 100000], {"type": "int64", "value": [50000]}], {}, 2),
    ("NonZero", [("bool", SQUARE)], {}, 1),
    ("BatchNormalization", [[3, 20000, 8, 8], *[[20000]] * 4], {"training_mode": 1}, 3),
    ("Dropout", [SQUARE, {"type": "float32", "value": 0.5}, {"type": "bool", "value": True}], {}, 1),
    ("Einsum", [[8, 64, 128], [128, 384]], {"equation": "abc,cd->abd"}, 1),
    ("Einsum", [[4, 64, 8, 32], [4, 8, 48, 64]], {"equation": "zayb,zyca->zybc"}, 1),
    ("Einsum", [[8, 64, 128], [8, 64, 512]], {"equation": "abc,abd->cd"}, 1),
    ("Einsum", [[100, 200], [200, 300], [300, 150]], {"equation": "ij,jk,kl->il"}, 1),
    ("LSTM", [[64, 32, 40], [1, 400, 40], [1, 400, 100]], {"hidden_size": 100}, 3),
    ("GRU", [[64, 32, 40], [2, 300, 40], [2, 300, 100]], {"hidden_size": 100, "direction": "bidirectional"}, 2),
    ("FastGelu", [SQUARE, [1000]], {}, 1, MS),
    ("FusedMatMul", [[4096, 8, 16], [4096, 8, 16]], {"transA": 1}, 1, MS),
]
TRAINING_CASES = [
    ("SoftmaxCrossEntropyLoss", [[16, 16, 64, 64], ("int64", [16, 64, 64])], {}, 2),
    ("ConvGrad", [[8, 32, 64, 64], IMAGE, KERNEL], PAD, 3, MS),
    ("LayerNormalizationGrad", [SQUARE, SQUARE, [1000], [1024, 1], [1024, 1]], {"axis": -1}, 3, MS),
    ("BatchNormInternal", [[3, 20000, 8, 8], *[[20000]] * 4], {}, 5, MS),
    ("BatchNormalizationGrad", [[3, 20000, 8, 8]] * 2 + [[20000]] * 3, {"epsilon": 1e-5}, 3, MS),
    ("SoftmaxGrad_13", [SQUARE] * 2, {"axis": 0}, 1, MS),
    ("LogSoftmaxGrad_13", [SQUARE] * 2, {"axis": -1}, 1, MS),
    ("GeluGrad", [SQUARE] * 2, {}, 1, MS),
    ("BiasGeluGrad_dX", [SQUARE, SQUARE, [1000]], {}, 1, MS),
    ("GatherElementsGrad", [SQUARE, {"type": "int64", "value": SQUARE}, ("int64", SQUARE)], {"axis": 1}, 1, MS),
    ("ReduceSumTraining", [[7, 6000, 110], {"type": "int64", "value": [1]}], {}, 1, MS),
    ("LSTMTraining", [[64, 32, 40], [1, 400, 40], [1, 400, 100]], {"hidden_size": 100}, 5, MS),
]
RATES = [  # case, FLOPs, bytes moved
    (("MatMul", [[1024, 1024], [1024, 1024]], {}, 1), 2 * 1024**3, 0),
    (("Conv", [[8, 64, 32, 32], [64, 64, 3, 3]], PAD, 1), 2 * 8 * 64 * 64 * 1024 * 9, 0),
    (("Add", [[1024, 1024]] * 2, {}, 1), 0, 12 * 1024**2),
    (("Relu", [[1024, 1024]], {}, 1), 0, 8 * 1024**2),
    (("Exp", [[1024, 1024]], {}, 1), 0, 8 * 1024**2),
    (("Softmax", [[1024, 1024]], {}, 1), 0, 8 * 1024**2),
    (("Transpose", [[16, 64, 16, 64]], {"perm": [0, 2, 1, 3]}, 1), 0, 8 * 1024**2),
    (("Log", [[1024, 1024]], {}, 1), 0, 8 * 1024**2),
    (("RandomUniformLike", [[1024, 1024]], {}, 1), 0, 4 * 1024**2),
]


def array(spec):
    """The feed of an input of a case."""
    if isinstance(spec, dict):
        return np.array(spec["value"], spec["type"])
    kind, shape = spec if len(spec) == 2 and isinstance(spec[0], str) else ("float32", spec)
    rng = np.random.default_rng(0)
    return rng.random(shape, "float32") if kind == "float32" else rng.integers(0, 2, shape).astype(kind)


def one_node(case):
    """The model of a case and its feeds."""
    from onnx import helper

    op, inputs, attributes, outputs, *domain = case
    feeds = {f"i{k}": array(s) for k, s in enumerate(inputs) if s is not None}
    node = helper.make_node(
        op,
        ["" if s is None else f"i{k}" for k, s in enumerate(inputs)],
        [f"o{k}" for k in range(outputs)],
        domain=domain[0] if domain else "",
        **attributes,
    )
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    made = [helper.make_empty_tensor_value_info(f"o{k}") for k in range(outputs)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)]
    return helper.make_model(helper.make_graph([node], op, given, made), opset_imports=imports, ir_version=8), feeds


def inside(case, threads, rates):
    """Runs in the fresh process: prints peak, shapes and types of the outputs, and seconds, as one JSON line."""
    import onnxruntime as ort

    model, feeds = one_node(case)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_cpu_mem_arena, options.enable_mem_pattern = rates, False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tracer = ctypes.CDLL(None)
    for name in () if rates else ("trace_peak", "trace_start"):
        getattr(tracer, name).restype = ctypes.c_long
    seconds, taken, outputs = [], 0, []
    for _ in range(9 if rates else 2):
        del outputs
        start = 0 if rates else tracer.trace_start()
        clock = time.perf_counter()
        outputs = session.run(None, feeds)
        seconds.append(time.perf_counter() - clock)
        taken = 0 if rates else tracer.trace_peak() - start
    print(json.dumps([taken, [[str(o.dtype), o.shape] for o in outputs], min(seconds)]))


def measure(case, a, library):
    """What `inside` prints, or None where the runtime refuses the model."""
    command = [a.python, os.path.abspath(__file__), "--inside", json.dumps(case), "--threads", str(a.threads)]
    env = dict(os.environ, LD_PRELOAD=library) if library else dict(os.environ)
    done = subprocess.run(command + (["--rates"] if a.rates else []), env=env, capture_output=True, text=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def predicted(case, shapes, training):
    """`workspace_bytes` of a case whose outputs have the types `shapes`."""
    from onnx import helper

    from onnx_sublinear.ops.tensor_types import TensorType
    from onnx_sublinear.ops.workspace import workspace_bytes

    model, feeds = one_node(case)
    node = model.graph.node[0]

    def known(dtype, shape):
        return TensorType(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), tuple(shape))

    inputs = [known(feeds[n].dtype, feeds[n].shape) if n else None for n in node.input]
    return workspace_bytes(node, inputs, [known(d, s) for d, s in shapes], 18, training=training)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the runtime to measure")
    parser.add_argument("--training", action="store_true", help="that runtime is onnxruntime-training")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.inside:
        inside(json.loads(a.inside), a.threads, a.rates)
        return 0
    if a.rates:
        for case, flops, moved in RATES:
            seconds = measure(case, a, "")[2]
            print(f"{case[0]:18s} {flops / seconds / 1e9:8.1f} GFLOP/s {moved / seconds / 1e9:8.1f} GB/s")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "libtrace.so")
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=TRACER.encode(), check=True
        )
        print(f"{'operator':28s} {'measured':>12s} {'predicted':>12s}")
        for case in CASES + (TRAINING_CASES if a.training else []):
            found = measure(case, a, library) if a.only in case[0] else None
            if found is None:
                continue
            taken, shapes, _ = found
            outputs = [int(np.prod(s)) * np.dtype(d).itemsize for d, s in shapes]
            scratch = taken - sum(n for n in outputs if n >= 4096)
            formula = predicted(case, shapes, a.training)
            off = abs(formula - scratch) > max(0.02 * scratch, 8192)
            wrong += off
            print(f"{case[0]:28s} {scratch:12d} {formula:12d} {'<--' if off else ''} {[s for s in case[1] if s]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
