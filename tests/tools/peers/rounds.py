"""Off by as much as eight bits allow, and says so."""
from _fake import Fake, serve


class Peer(Fake):
    factor = 1.03
    mode = "a8"


serve(Peer)
