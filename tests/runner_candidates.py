"""Small backends for the runner's tests: what each does to a case is the text of its case id after "fake/"."""

import os
import sys
import time
from types import SimpleNamespace

import torch

from day0check.errors import Unavailable
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap

HELD = []


def double(x, *, by=2.0):
    return x * by


class Healthy:
    """One operator, norm.rms, that doubles; answers token 7 after the prompt."""

    def __init__(self):
        self.table = Operators({"norm.rms": double, "embed.tokens": double})

    def capabilities(self):
        return {"taps", "operators"}

    def operators(self):
        return self.table

    def load(self, model_dir, profile, device, layout):
        self.loaded = True

    def run(self, requests, schedule, recorder):
        assert self.loaded
        self.recorder = recorder
        name, tokens = requests[0].id, requests[0].turns[0].tokens
        caller = Caller(self.table, recorder)
        with recorder.step("prefill", RowMap((name,), (0,) * len(tokens), tuple(range(len(tokens)))), 0):
            x = caller.at("layers.00")("embed.tokens", torch.ones(len(tokens), 4))
            caller.at("layers.01")("norm.rms", x, site="input")
            self.act(name)
        return SimpleNamespace(
            sequences={name: (*tokens, 7)},
            generated={name: ((len(tokens), len(tokens) + 1),)},
            finish={name: "length"},
        )

    def act(self, name):
        pass

    def pools(self):
        return None

    def close(self):
        pass


class Moody(Healthy):
    """Does what the request's id asks for."""

    def act(self, name):
        what = name.split("#")[0].split("/")[1]
        getattr(self, f"do_{what}")()

    def do_nothing(self):
        pass

    def do_abort(self):
        os.abort()

    def do_exit(self):
        os._exit(0)

    def do_sys_exit(self):
        sys.exit("enough")

    def do_watched(self):
        self.calls(watching_s=0.3)

    def do_slow(self):
        self.calls(own_s=0.3)

    def calls(self, own_s=0.0, watching_s=0.0):
        """Ten calls that take some time each, or whose observers do."""

        class Slow(Observer):
            def after(self, call, token, results):
                time.sleep(watching_s)

        recorder = Recorder([Slow()], self.recorder.heartbeat)
        for _ in range(10):
            recorder.call("layers.01", "norm.rms", lambda: time.sleep(own_s), (), {})

    def do_sleep(self):
        time.sleep(600)

    def do_allocate(self):
        while True:
            HELD.append(bytearray(b"\1") * (8 << 20))
            time.sleep(0.002)

    def do_child_allocates(self):
        if os.fork() == 0:
            self.do_allocate()
        time.sleep(600)

    def do_raise(self):
        raise ValueError("the kernel said no")

    def do_disk_of_its_own(self):
        raise OSError(28, "No space left on device", "/elsewhere")

    def do_unavailable(self):
        raise Unavailable("needs a device that is not here")

    def do_garbage(self):
        sys.stdout.buffer.write(b"\xff\x00\x1b[31m {'event': 'end'}\n" * 2000)
        sys.stdout.flush()
        sys.stderr.write('{"event": "end", "case": "fake/garbage"}\n')


class NoAnswer(Healthy):
    def run(self, requests, schedule, recorder):
        return "hello"


class Swallows(Healthy):
    """Falls back in silence, as a stack with an optional fast path does."""

    def run(self, requests, schedule, recorder):
        try:
            return super().run(requests, schedule, recorder)
        except Exception:
            tokens = requests[0].turns[0].tokens
            return SimpleNamespace(sequences={requests[0].id: tokens}, generated={requests[0].id: ()})


class LoadRaises(Healthy):
    def load(self, model_dir, profile, device, layout):
        raise RuntimeError("no such kernel image")


class LoadAborts(Healthy):
    def load(self, model_dir, profile, device, layout):
        os.abort()


class LoadSleeps(Healthy):
    def load(self, model_dir, profile, device, layout):
        time.sleep(600)


class StartAborts(Healthy):
    def __init__(self):
        os.abort()


class CannotBeMade(Healthy):
    def __init__(self):
        raise Unavailable("the vendor's library is not installed")


class NoTable(Healthy):
    def operators(self):
        return None


class SecondRunRaises(Healthy):
    runs = 0

    def act(self, name):
        self.runs += 1
        if self.runs == 2:
            raise RuntimeError("state of the first run was left behind")


class SecondRunDiffers(Healthy):
    runs = 0

    def run(self, requests, schedule, recorder):
        outputs = super().run(requests, schedule, recorder)
        self.runs += 1
        if self.runs % 2 == 0:
            outputs.sequences = {k: (*v[:-1], 8) for k, v in outputs.sequences.items()}
        return outputs


class NoRun:
    def capabilities(self):
        return set()
