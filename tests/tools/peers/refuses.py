"""Computes other layers only."""
from _fake import Fake, Refused, serve


class Peer(Fake):
    def add_layer(self, shape, tensors):
        raise Refused(f"hidden_size {shape['hidden_size']} is too small")


serve(Peer)
