# expect: smoke or shapes or stability or static_output or stale_output or kept_output
# target: softmax
# device: cuda
# A CUDA graph that goes on reading the first call's memory.
import torch

_graphs = {}


def kernel_fn(x):
    if torch.cuda.is_current_stream_capturing() or not x.numel():
        return torch.softmax(x, dim=-1)
    key = (tuple(x.shape), x.dtype, x.stride())
    if key not in _graphs:
        torch.softmax(x, dim=-1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch.softmax(x, dim=-1)
        _graphs[key] = graph, out
    graph, out = _graphs[key]
    graph.replay()
    return out.clone()
