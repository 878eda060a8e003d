"""Ends in the middle of its first turn."""
import os
import sys

from _fake import Fake, serve


class Peer(Fake):
    calls = 0

    def apply(self, layer, routing):
        self.calls += 1
        if self.calls > 5:
            print("these are my last words", file=sys.stderr, flush=True)
            os._exit(7)
        super().apply(layer, routing)


serve(Peer)
