"""The adapters' side of the protocol in README.md: JSON lines over stdin and stdout, tensors in
memory that the command shares. An adapter defines a peer and calls serve(); only the standard
library is used here."""

import gc
import json
import mmap
import os
import sys
import time


class Missing(Exception):
    """The peer is not installed; `install` says how to install it."""

    def __init__(self, reason, install):
        super().__init__(reason)
        self.install = install


class Refused(Exception):
    """The peer is there but does not compute this layer."""


class Shared:
    """Memory that the command made and that this process has open by number."""

    def __init__(self):
        self.maps = {}

    def view(self, fd, offset, size):
        """size bytes from offset on, writable, without a copy."""
        end = offset + size
        if fd not in self.maps or len(self.maps[fd]) < end:
            self.maps[fd] = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
        return memoryview(self.maps[fd])[offset:end]

    def forget(self, fd):
        """The command is about to give the memory back; views must be gone."""
        self.maps.pop(fd, None)


def _steps(peer, steps):
    """Microseconds of each step. The first call is not timed: it wakes the threads."""
    peer.apply(0, steps[0][0])
    times = []
    for routings in steps:
        start = time.perf_counter_ns()
        for layer, routing in enumerate(routings):
            peer.apply(layer, routing)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def _answer(peer, shared, request):
    do = request["do"]
    if do == "layer":
        tensors = {name: shared.view(request["memory"], *span)
                   for name, span in request["tensors"].items()}
        return peer.add_layer(request["shape"], tensors) or {}
    if do == "clear":
        peer.clear()
        return {}
    if do == "forget":
        gc.collect()
        shared.forget(request["memory"])
        return {}
    if do == "inputs":
        def view(span):
            return shared.view(request["memory"], *span)
        peer.set_inputs(request["num_tokens"], view(request["hidden"]),
                        [(view(ids), view(weights)) for ids, weights in request["routings"]],
                        view(request["output"]))
        return {}
    if do == "check":
        peer.apply(request["layer"], request["routing"])
        return {}
    if do == "steps":
        return {"time_us": _steps(peer, request["steps"])}
    raise ValueError(f"unknown request {do!r}")


def serve(make_peer, prepare=None):
    """Answers requests until stdin ends. prepare(threads), if given, comes first and may start the
    program again, which must be before stdout is taken below. make_peer(threads) returns an object
    with `version`, `about`, add_layer(shape, tensors), which may return {"mode": "a8"}, clear(),
    set_inputs(num_tokens, hidden, routings, output) and apply(layer, routing), or raises Missing.
    Tensors are memoryviews in the layouts of README.md."""
    threads = int(sys.argv[sys.argv.index("--threads") + 1])
    if prepare:
        prepare(threads)
    # Libraries print to stdout as they like; only this keeps the lines of the protocol clean.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line):
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        peer = make_peer(threads)
    except Missing as error:
        say({"missing": str(error), "install": error.install})
        return
    say({"version": peer.version, "about": peer.about})
    gc.disable()  # no pause inside a timed step
    shared = Shared()
    for line in sys.stdin:
        try:
            say(_answer(peer, shared, json.loads(line)) | {"ok": True})
        except Refused as error:
            say({"refused": str(error)})
        except Exception as error:  # the command shows it; a trace would hide it
            say({"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]})
        gc.collect(0)
