"""Outputs that are 5 % too large."""
from _fake import Fake, serve


class Peer(Fake):
    factor = 1.05


serve(Peer)
