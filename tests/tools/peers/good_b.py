"""Right, too: takes turns with the other."""
from _fake import Fake, serve

serve(Fake)
