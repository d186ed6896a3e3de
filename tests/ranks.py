"""Run a function on several real ranks, in milliseconds.

    from ranks import run

    def test_sum():
        assert run(2, lambda: all_reduced(torch.ones(1)).item()) == [2.0, 2.0]

Every call gets *new* rank processes, joined by a new gloo process group over a new TCPStore, so nothing that a function
leaves behind (Accelerate's singletons, an unmatched collective, a logging handler, a patched module) can reach the next
call. That is affordable because the ranks are forked from a process that has imported torch and Accelerate already:

    pytest  -- "two ranks for call 7" -->  fork server  -- fork -->  rank 0, rank 1

- *pytest* (`run`, `_Pool`) hands out the task as a file, collects the results and keeps the deadlines. There is one pool
  for each pytest process, so the workers of pytest-xdist do not share anything.
- *the fork server* (`_Server`) only imports and forks. It must stay free of threads: what is forked while some other
  thread holds a lock, even one inside glibc, can wait for that lock for ever.
- *a rank* (`_be_a_rank`) runs the function, writes the outcome to a file, says so, and waits to be killed.

A module that the pytest process has imported and that the function mentions is imported in the fork server, once. What
only the function imports is imported anew on each rank in every call. A test of what an import does needs a process of
its own.
"""

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import io
import itertools
import json
import multiprocessing
import os
import pickletools
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle


# Imported before the first fork. Creating an optimizer imports torch._dynamo, which takes two seconds.
# Accelerate imports `datasets`, where it is installed, with every ordinary loader that it prepares.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "accelerate", "cloudpickle", "datasets")
START_TIMEOUT = 180.0  # seconds for the fork server to import what the ranks need
END_TIMEOUT = 10.0  # seconds for killed processes to be gone
STACK_TIMEOUT = 1.0  # seconds for a hanging rank to write its stack
TAIL = 4000  # bytes of a rank's output that an error shows


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a rank has no result.

    Args:
        type_name (`str`):
            The name of the exception's class; `"Died"` for a process that ended, `"Hung"` for one that did not answer.
        message (`str`):
            The exception's text, or how the process ended (exit code, signal), or how long it was waited for.
        traceback (`str`):
            The traceback of the exception, or where a hanging rank was. Empty for a process that died.
        output (`str`, *optional*):
            The end of what the rank wrote to stdout and stderr.
    """

    type_name: str
    message: str
    traceback: str
    output: str = ""


class RankError(Exception):
    """Some ranks have no result.

    **Available attributes:**

        - **errors** (`dict[int, Failure]`) -- the failing ranks.
    """

    def __init__(self, errors: dict[int, Failure], world_size: int):
        self.errors = errors
        # Ranks that wait for the one that failed are a consequence: the cause comes first.
        causes_first = sorted(errors, key=lambda rank: (errors[rank].type_name == "Hung", rank))
        parts = [f"{len(errors)} of {world_size} ranks failed: {causes_first}"]
        for rank in causes_first:
            failure = errors[rank]
            parts.append(f"--- rank {rank}: {failure.type_name}: {failure.message}")
            parts.append(failure.traceback.rstrip())
            if failure.output.strip():
                parts.append(f"--- rank {rank} wrote:\n{failure.output.rstrip()}")
        super().__init__("\n".join(part for part in parts if part))


def run(
    world_size: int,
    function: Callable,
    *args,
    timeout: float = 60.0,
    grace: float = 2.0,
    env: dict[str, str | None] | None = None,
    outcomes: bool = False,
    **kwargs,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on every rank of a process group, at the same time.

    On each rank the default gloo process group is initialized and the environment is what a launcher sets, so
    `Accelerator(cpu=True)` finds itself on one of `world_size` processes. The random number generators of torch, numpy
    and Python start from a fixed seed that is different on each rank, as real ranks' are.

    "New processes", for a test of resuming, are a second call. Destroying the default group and initializing it again in
    the same one can hang, as it can under torchrun: torch finds the old addresses in the store.

    Args:
        world_size (`int`):
            How many ranks.
        function (`Callable`):
            Anything cloudpickle can send: a function of a test module, a lambda, a closure.
        timeout (`float`, *optional*, defaults to 60):
            The seconds until ranks without an outcome are given up as hanging.
        grace (`float`, *optional*, defaults to 2):
            The seconds that the other ranks get to finish after one has failed.
        env (`dict[str, str | None]`, *optional*):
            More environment variables; `None` removes one. The rest is the pytest process' environment.
        outcomes (`bool`, *optional*, defaults to `False`):
            Whether to return a [`Failure`] in the place of a result instead of raising.

    Returns:
        `list`: The results, by rank.
    """
    __tracebackhide__ = True  # pytest shows the line of the test that calls, and the error
    if world_size < 1:
        raise ValueError(f"world_size must be positive, got {world_size}")
    task = {
        "function": function,
        "args": args,
        "kwargs": kwargs,
        "environ": dict(os.environ),
        "env": env or {},
        "path": sys.path,
        "cwd": os.getcwd(),
    }
    pool = _Pool.get()
    results = pool.run(world_size, _by_value(task), timeout, grace)
    errors = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if errors and not outcomes:
        raise RankError(errors, world_size)
    return results


def shutdown() -> None:
    """Ends the fork server of this process, if there is one. The next [`run`] starts another."""
    if _Pool.current is not None:
        _Pool.current.close()


# ----------------------------------------------------------------------------------------------- the pytest process


def _by_value(task: dict) -> bytes:
    """Pickles with the content of the test modules inside, so that ranks need not import them (and pytest with them)."""
    with contextlib.ExitStack() as stack:
        for name in filter(_is_test_module, list(sys.modules)):
            cloudpickle.register_pickle_by_value(sys.modules[name])
            stack.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        return _dumps(task)


def _is_test_module(name: str) -> bool:
    if not name.rpartition(".")[2].startswith(("test_", "conftest")):
        return False
    # Not a package, such as accelerate.test_utils.
    return os.path.basename(getattr(sys.modules[name], "__file__", None) or "__init__.py") != "__init__.py"


def _modules_in(task: bytes) -> list[str]:
    """The loaded modules whose names occur in a pickle: what it refers to, and what its functions import."""
    names = {argument for _, argument, _ in pickletools.genops(task) if isinstance(argument, str)}
    return sorted(name for name in names & sys.modules.keys() if name != "__main__" and not _is_test_module(name))


def _reduce_code(code: types.CodeType) -> tuple:
    return _code_at, (code.co_filename, *cloudpickle.Pickler.dispatch_table[types.CodeType](code))


def _code_at(filename: str, constructor: Callable, arguments: tuple) -> types.CodeType:
    return constructor(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of functions, which cloudpickle drops, so that tracebacks show the lines of the test."""

    dispatch_table = collections.ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def _dumps(obj: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


class _ServerDied(Exception):
    pass


class _Pool:
    """The pytest process' end: a fork server, and the calls it was asked to serve, one at a time."""

    current: "_Pool | None" = None

    @classmethod
    def get(cls) -> "_Pool":
        if cls.current is not None and cls.current.process.poll() is not None:
            cls.current.close()
        if cls.current is None or cls.current.owner != os.getpid():
            cls.current = cls()
        return cls.current

    def __init__(self):
        self.owner = os.getpid()
        self.calls = itertools.count(1)
        self.pids: list[int] = []
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        ours, theirs = socket.socketpair()
        self.lines = _Lines(ours)
        command = (
            f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); "
            f"import ranks; ranks._Server({theirs.fileno()}, {str(self.directory)!r}, {os.getpid()}).serve({PRELOAD!r})"
        )
        environment = {
            # One thread: the numeric libraries start theirs as soon as they are imported.
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            # Python's objects in huge pages where the system has them: a fork copies the table of pages, which is most
            # of what it costs, and this makes the table a tenth as long. The ranks get pytest's environment instead.
            "PYTHONMALLOC": "malloc",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        with open(self.directory / "server.log", "wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Neither ctrl-C nor a signal to pytest's whole group may end the process that cleans up.
                start_new_session=True,
            )

    def run(self, world_size: int, task: bytes, timeout: float, grace: float) -> list[Any]:
        """Runs a pickled task on every rank and returns results and failures, by rank."""
        call = next(self.calls)
        directory = self.directory / str(call)
        directory.mkdir()
        (directory / "task").write_bytes(task)
        request = {
            "call": call,
            "world_size": world_size,
            "path": sys.path,
            "imports": _modules_in(task),
        }
        try:
            self.lines.send({"command": "fork", **request})
            self.early: list[dict] = []
            self.pids = self._wait_for(call, "forked", START_TIMEOUT)["pids"]
            return self._collect(call, directory, world_size, timeout, grace)
        except (_ServerDied, OSError) as error:
            log = _tail(self.directory / "server.log")
            self.close()
            raise RuntimeError(f"the process that forks the ranks died: {error}\n{log}") from error
        finally:
            self._end(call)
            shutil.rmtree(directory, ignore_errors=True)

    def _collect(self, call: int, directory: Path, world_size: int, timeout: float, grace: float) -> list[Any]:
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        reason = f"no result after {timeout:g} s"
        failed = False
        while len(outcomes) < world_size:
            message = self.early.pop(0) if self.early else self.lines.receive(deadline)
            if message is None:
                break
            rank = message.get("rank")
            if message["call"] != call or rank is None or rank in outcomes:
                continue
            if message["event"] == "done":
                outcomes[rank] = _load(directory / f"{rank}.outcome")
            else:
                outcomes[rank] = Failure("Died", _how(message["status"]), "")
            if isinstance(outcomes[rank], Failure) and not failed:
                failed = True
                if time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    reason = f"no result {grace:g} s after rank {rank} failed"
        hanging = [rank for rank in range(world_size) if rank not in outcomes]
        for rank, stack in self._stacks(directory, hanging).items():
            outcomes[rank] = Failure("Hung", reason, stack)
        for rank, outcome in outcomes.items():
            if isinstance(outcome, Failure):
                outcomes[rank] = dataclasses.replace(outcome, output=_tail(directory / f"{rank}.output"))
        return [outcomes[rank] for rank in range(world_size)]

    def _stacks(self, directory: Path, ranks: list[int]) -> dict[int, str]:
        """Where ranks are, all threads. A stopped process cannot say and must not be waited for."""
        files = {rank: directory / f"{rank}.stack" for rank in ranks}
        for rank in ranks:
            # The pid cannot belong to anyone else: the rank has not been reaped, or its end would have been reported.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT
        while ranks and time.monotonic() < deadline and not all(_tail(file) for file in files.values()):
            time.sleep(0.02)
        if ranks:
            time.sleep(0.05)  # for the rest of a stack of which the beginning is there
        return {rank: _without_us(_tail(file)) or "(it did not say where it is)" for rank, file in files.items()}

    def _wait_for(self, call: int, event: str, timeout: float) -> dict:
        deadline = time.monotonic() + timeout
        while True:
            message = self.lines.receive(deadline)
            if message is None:
                raise _ServerDied(f"no answer ({event}) after {timeout:g} s")
            if message["call"] == call and message["event"] == event:
                return message
            # A quick rank may be done before the server has said that it was forked.
            self.early.append(message)

    def _end(self, call: int) -> None:
        """Ends the processes of a call, whatever they do."""
        if _Pool.current is not self:
            return
        try:
            self.lines.send({"command": "end", "call": call})
            self._wait_for(call, "ended", END_TIMEOUT)
        except (_ServerDied, OSError):
            self.close()
        self.pids = []

    def close(self) -> None:
        """Ends the fork server: it sees the end of its input, ends its ranks and removes the directory."""
        if _Pool.current is self:
            _Pool.current = None
        if self.owner != os.getpid():
            return  # a forked child of the pytest process
        self.lines.socket.close()
        try:
            self.process.wait(END_TIMEOUT if not self.pids else 1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_TIMEOUT)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


atexit.register(shutdown)


class _Lines:
    """JSON messages, one a line, over a socket. Each is far smaller than what a socket takes at once."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.rest = b""

    @property
    def pending(self) -> bool:
        """Whether [`receive`] has a message without waiting for one."""
        return b"\n" in self.rest

    def send(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict | None:
        """The next message, or `None` when there is none until `deadline` (a value of `time.monotonic`)."""
        while not self.pending:
            if not select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            received = self.socket.recv(65536)
            if not received:
                raise _ServerDied("end of its output")
            self.rest += received
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)


def _load(file: Path) -> Any:
    try:
        return cloudpickle.loads(file.read_bytes())
    except Exception as error:
        return Failure(type(error).__name__, f"the result could not be read: {error}", traceback.format_exc())


def _without_us(stack: str) -> str:
    """A stack without the frames that every rank has."""
    ours = (f'  File "{__file__}"', '  File "<string>", line 1 in <module>')
    return "".join(line for line in stack.splitlines(keepends=True) if not line.startswith(ours))


def _tail(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            skipped = max(0, os.fstat(stream.fileno()).st_size - TAIL)
            stream.seek(skipped)
            return "[...]" * bool(skipped) + stream.read(TAIL).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        known = {item.value: item.name for item in signal.Signals}
        return f"killed by {known.get(-code, f'signal {-code}')}"
    return f"exited with code {code} before it returned a result"


# ------------------------------------------------------------------------------------------------- the fork server


class _Server:
    """Forks ranks on demand until the pytest process closes the connection or is gone."""

    def __init__(self, descriptor: int, directory: str, parent: int):
        self.lines = _Lines(socket.socket(fileno=descriptor))
        self.directory = directory
        self.parent = parent
        self.ranks: dict[int, dict] = {}  # by pid

    def serve(self, preload: tuple[str, ...]) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a dead rank's own children become ours to end and reap
        _without_dns()
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())
        try:
            _import(preload)
            self.store, self.ports = _host_stores()
            while os.getppid() == self.parent:
                readable, _, _ = select.select([self.lines.socket, woken], [], [], 1.0)
                if woken in readable:
                    woken.recv(4096)
                    self.reap()
                while self.lines.socket in readable or self.lines.pending:
                    readable = []
                    request = self.lines.receive(time.monotonic() + 1.0)
                    if request is not None:
                        self.answer(request)
        except (_ServerDied, OSError):
            pass  # the pytest process is gone
        finally:
            self.store = None
            self.end()
            shutil.rmtree(self.directory, ignore_errors=True)

    def answer(self, request: dict) -> None:
        call = request["call"]
        self.end()  # also before a fork: the pytest process may have been interrupted before it said "end"
        if request["command"] == "end":
            self.lines.send({"call": call, "event": "ended"})
            return
        sys.path[:] = request["path"]
        _import(request["imports"])
        self.ports.sendall(b"?")
        request["port"] = int(self.ports.recv(16))
        for rank in range(request["world_size"]):
            self.ranks[self.fork(request, rank)] = {"call": call, "rank": rank}
        self.lines.send({"call": call, "event": "forked", "pids": list(self.ranks)})

    def fork(self, request: dict, rank: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too: the group must exist before anyone wants to kill it
            return pid
        try:
            os.setpgid(0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                _be_a_rank(request, rank, Path(self.directory) / str(request["call"]), self.lines)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def reap(self) -> None:
        """Reports the ranks that have ended by themselves, and ends the processes they have left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.store:
                raise _ServerDied("the store is gone")
            if pid in self.ranks:
                _kill_group(pid)
                self.lines.send({**self.ranks.pop(pid), "event": "exit", "status": status})

    def end(self) -> None:
        """Ends all ranks with all their descendants, and waits until they are gone."""
        for pid in self.ranks:
            _kill_group(pid)
        # What has left its rank's group is our child by now, or will be as soon as its parent has ended.
        while remaining := {*self.ranks, *_children()} - {self.store}:
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in remaining:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            self.ranks.clear()


def _import(names: Iterable[str]) -> None:
    new = [name for name in names if name not in sys.modules]
    if not new:
        return
    signal.alarm(int(START_TIMEOUT))  # nobody else would end an import that hangs
    for name in new:
        # A rank that needs the module will say what is wrong with it.
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    signal.alarm(0)
    if "tqdm" in sys.modules:
        # The thread with which it watches progress bars may hold a lock when a rank forks the workers of a loader.
        sys.modules["tqdm"].tqdm.monitor_interval = 0
    # Keeps garbage collection in the ranks fast, and the pages shared.
    gc.collect()
    gc.freeze()


def _host_stores() -> tuple[int, socket.socket]:
    """Starts a process that hosts a new TCPStore for each call, as a launcher does for each start of its ranks.

    Not in pytest's process nor in the server: hosting takes a thread, and both are forked.

    Returns:
        `tuple[int, socket.socket]`: The process' pid, and a connection that answers each byte with a port.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.settimeout(END_TIMEOUT)
        return pid, ours
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ours.close()
        from torch.distributed import TCPStore

        while theirs.recv(1):
            store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            theirs.sendall(str(store.port).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _without_dns() -> None:
    """Resolves names with /etc/hosts only, in this process and its forks.

    The store's connections look up the name of `::ffff:127.0.0.1`, which no hosts file has. That asks the name server,
    and one lost packet costs five seconds.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:
        return []


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


# -------------------------------------------------------------------------------------------------------- the rank


def _be_a_rank(request: dict, rank: int, directory: Path, lines: _Lines) -> None:
    """Runs the task, reports, and waits to be killed. Never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(directory / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    stack = open(directory / f"{rank}.stack", "w")
    faulthandler.enable()
    ForkingPickler.reducer_override = _reduce_by_value
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    if sys.hexversion < 0x030B0000:
        os.fork = _fork_beside_threads(os.fork)
    outcome = _outcome(request, rank, directory)
    if multiprocessing.active_children():
        gc.collect()  # lets the workers of a DataLoader end in order
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / f"{rank}.outcome").write_bytes(outcome)
    lines.send({"call": request["call"], "rank": rank, "event": "done"})
    # The others may still need this rank's connections. Without it, whether a rank that waits for this one in vain
    # sees an error or hangs would depend on chance.
    while True:
        signal.pause()


def _fork_beside_threads(fork: Callable[[], int]) -> Callable[[], int]:
    """CPython 3.10 hangs in the child if another thread is ending at that moment, as those of a loader's last workers do."""

    def fork_later() -> int:
        time.sleep(0.05)
        return fork()

    return fork_later


def _reduce_by_value(pickler: ForkingPickler, obj: Any) -> Any:
    """Lets a spawned DataLoader worker have the functions and classes of a test module, which it could not import."""
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ not in sys.modules:
        return cloudpickle.loads, (_dumps(obj),)
    return NotImplemented


def _outcome(request: dict, rank: int, directory: Path) -> bytes:
    """The pickled result, or the pickled [`Failure`]."""
    try:
        task = cloudpickle.loads((directory / "task").read_bytes())
        _launch(task, request, rank)
        return _dumps(task.pop("function")(*task.pop("args"), **task.pop("kwargs")))
    except BaseException as error:
        # The first frame is this one.
        lines = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return _dumps(Failure(type(error).__name__, str(error), "".join(lines)))


def _launch(task: dict, request: dict, rank: int) -> None:
    """Makes this process what a launcher's child is after it has initialized its process group."""
    import torch

    os.chdir(task["cwd"])
    sys.path[:] = task["path"]
    os.environ.clear()
    world_size = str(request["world_size"])
    os.environ.update(
        task["environ"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
        # As under torchrun: the launcher hosts the store, and rank 0 is a client like the others.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    for name, value in task["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)
    torch.distributed.init_process_group("gloo")
    # Nobody starts before all have joined: a function that ends its process at once would break the others' joining.
    # Through the store, which no rank can take with it.
    store = torch.distributed.distributed_c10d._get_default_store()
    if store.add("joined", 1) == request["world_size"]:
        store.set("all joined", "yes")
    store.wait(["all joined"])
