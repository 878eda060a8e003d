"""Plain torch: a loop over the active experts with two matrix products each, as models' reference
code does it. Not a fused kernel: what one gets without any."""

from _adapter import Refused, serve
from _torch_peer import TorchPeer, import_torch, restart_with


class Peer(TorchPeer):
    def __init__(self, threads):
        torch = import_torch("pip install torch")
        super().__init__(torch, threads)
        self.version = f"torch {torch.__version__}"
        self.about = "a loop over experts in plain torch"

    def add_layer(self, shape, tensors):
        self.check_shape(shape)
        if shape["activation"] != "silu" or shape["bias"]:
            raise Refused("this adapter drives silu without biases only")
        self.layers.append(tuple(w.clone() for w in self.matrices(shape, tensors)))

    def apply(self, layer, routing):
        torch = self.torch
        w13, w2 = self.layers[layer]
        ids, weights = self.routings[routing]
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
        sums = torch.zeros(self.hidden.shape, dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            slots = order[begin:begin + count]
            begin += count
            tokens = slots // ids.shape[1]
            gate, up = (self.hidden[tokens] @ w13[expert].t()).chunk(2, dim=-1)
            rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
            sums.index_add_(0, tokens, rows.float() * weights.view(-1, 1)[slots])
        self.output.copy_(sums)


serve(Peer, lambda threads: restart_with(threads, []))
