"""Meets an exception of its own."""
from _fake import Fake, serve


class Peer(Fake):
    def set_inputs(self, num_tokens, hidden, routings, output):
        raise KeyError("inputs")


serve(Peer)
