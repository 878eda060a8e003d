"""Not installed."""
from _fake import Missing, serve


def make(threads):
    raise Missing("no module named missing", "pip install missing-peer")


serve(make)
