"""Starts a local target and clears it away: servers, proxies, one or two stacks. Knows no fault and
no invariant."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from services.standalone.cores import usable_cores
from services.standalone.ports import LOOPBACK
from services.standalone.preload import preload
from services.standalone.servers import FAST, Postgres, Valkey
from services.standalone.settings import CLERK as CLERK_FOLDER
from services.standalone.settings import StandaloneSettings
from shardline.base.config import Times
from shardline.contract.job import MAX_CRASHES
from tests.chaos.load.encoders.texts import of_encoders
from tests.chaos.load.requests import MODEL
from tests.chaos.load.target import ResultBackend
from tests.chaos.load.users import CLERK, SCRIBE
from tests.chaos.load.workload import LoadName, Workload, adapter_names, lab, of_users
from tests.chaos.network.hop_net import HopNet
from tests.chaos.network.proxy import Proxy
from tests.chaos.shims.clock import Clock
from tests.chaos.shims.disk import Disk
from tests.chaos.shims.shim import preloaded
from tests.chaos.stack.fleet_worker import FleetWorker
from tests.chaos.stack.local_target import LOGS_KEPT, LocalTarget
from tests.chaos.stack.options import FLEET_MIB, KV_MIB, KV_OFFLOAD_MIB, SMALL_KV_MIB, Options
from tests.repository import REPOSITORY
from tests.stack import Stack

WORKLOADS: Mapping[LoadName, Callable[[], Workload]] = MappingProxyType(
    {
        LoadName.LAB: lab,
        LoadName.USERS: lambda: of_users([CLERK, SCRIBE]),
        LoadName.ENCODERS: of_encoders,
    }
)
DEBUG = {"enable-debug-command": "local"}
PLAIN = "?sslmode=disable&gssencmode=disable"
SECOND_KV_MIB: Mapping[str, int] = MappingProxyType(
    {"float32": 2, "bfloat16": 1, "int8": 1, "int4": 1}
)
"""By dtype: exactly the tokens of the second model's limit."""
FAILPOINTS = "failpoints"
STACKS = ("stack", "second")
SERVERS = "servers"
RESULTS = "results"
"""Folders of their logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What stacks stand on, and what lies between."""

    postgres: Postgres
    redis: Valkey
    database_proxy: Proxy
    redis_proxy: Proxy

    @property
    def settings(self) -> Mapping[str, str]:
        """Where services find them: through the proxies."""
        database = f"postgresql://shardline@{LOOPBACK}:{self.database_proxy.port}/shardline{PLAIN}"
        redis = self.redis.url.replace(f":{self.redis.port}/", f":{self.redis_proxy.port}/")
        return {"SHARDLINE_DATABASE_URL": database, "SHARDLINE_REDIS_URL": redis}


@contextmanager
def local_target(options: Options) -> Iterator[LocalTarget]:
    """Ready, in a folder of its own; at the end nothing of it is left but its logs."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-chaos-"))
    failpoints = folder / FAILPOINTS
    kv_mib = folder / "kv_mib"
    failpoints.mkdir()
    is_users = options.load is not LoadName.LAB
    workload = WORKLOADS[options.load]()
    kv_mib.write_text(str(SMALL_KV_MIB[options.dtype] if is_users else KV_MIB))
    with ExitStack() as ending:
        ending.callback(_keep_logs, folder)
        clock = Clock(folder / "clocks")
        disk = Disk(folder / "disk")
        stage_preload = ending.enter_context(_preloaded(clock, disk))
        model = folder / "model" / MODEL
        _first_model(options, model)
        servers = _serve(ending, folder / SERVERS, composed_redis() if is_users else {})
        results = _results(ending, folder / RESULTS) if is_users and options.canvas else None
        hop_net = _hop_net(ending, options)
        shared = {**servers.settings, **_asked(options, folder, results)}
        shared["SHARDLINE_STAGE_PRELOAD"] = stage_preload
        adapters = _adapters(model, options.adapters)
        began_s = time.monotonic()
        stack = _stack(
            ending,
            folder / "stack",
            **shared,
            **hop_net.settings,
            SHARDLINE_MODEL=str(model),
            **adapters,
            **_shape(options),
            SHARDLINE_KV_MIB_FILE=str(kv_mib),
        )
        start_s = time.monotonic() - began_s
        unlike = _unlike(ending, stack, options)
        second = _second(ending, folder, options, shared) if is_users else None
        yield LocalTarget(
            stack=stack,
            second=second,
            postgres=servers.postgres,
            redis=servers.redis,
            redis_proxy=servers.redis_proxy,
            database_proxy=servers.database_proxy,
            hop_net=hop_net,
            clock=clock,
            disk=disk,
            model=model,
            times=Times().scaled(options.time_scale),
            failpoints=failpoints,
            kv_mib=kv_mib,
            adapters=_adapters_of(model) if options.adapters else None,
            num_started=options.num_started,
            is_fleet=options.workers is not None,
            unlike=unlike,
            num_ranks=options.tp,
            workload=workload.with_adapters(adapter_names(options.adapters)),
            results=results,
            start_s=start_s,
            hears_webhooks=True,
        )


def _hop_net(ending: ExitStack, options: Options) -> HopNet:
    hop_net = HopNet(is_open=options.insecure)
    hop_net.start()
    ending.callback(hop_net.stop)
    return hop_net


def _asked(options: Options, folder: Path, results: ResultBackend | None) -> Mapping[str, str]:
    """What the run is asked for, of every stack."""
    backend = {} if results is None else {"SHARDLINE_RESULT_BACKEND": results.url}
    return {
        **backend,
        "SHARDLINE_CACHE_DIR": str(folder / "cache"),
        "SHARDLINE_TIME_SCALE": str(options.time_scale),
        # Innocent jobs outlive any number of kills.
        "SHARDLINE_MAX_CRASHES": str(MAX_CRASHES),
        "SHARDLINE_DTYPE": options.dtype,
        **_outside_memory(options, folder / "offload"),
        "SHARDLINE_KERNEL": "auto" if options.exact else "off",
        "SHARDLINE_FAILPOINTS": str(folder / FAILPOINTS),
        "SHARDLINE_WEBHOOK_NETWORKS": f"{LOOPBACK}/32",
    }


def _outside_memory(options: Options, folder: Path) -> Mapping[str, str]:
    """What stages keep in files: KV of preempted jobs, weights of streamed layers."""
    return {
        "SHARDLINE_KV_OFFLOAD_MIB": str(0 if options.keeps_states else KV_OFFLOAD_MIB),
        "SHARDLINE_KV_OFFLOAD_DIR": str(folder),
        "SHARDLINE_STREAMED_LAYERS": str(options.streamed_layers),
        "SHARDLINE_STREAMED_LAYERS_DIR": str(folder),
    }


def _shape(options: Options) -> Mapping[str, str]:
    """How many stages the stack has, and of which kind."""
    ranks = {"SHARDLINE_TP": str(options.tp)} if options.tp > 1 else {}
    devices = {}
    if options.devices is not None:
        devices = {
            "SHARDLINE_DEVICES": options.devices,
            "SHARDLINE_DEVICE_MODULE": "tests.accelerator",
        }
    all_cores = {"SHARDLINE_STAGE_CORES": str(len(usable_cores()))}
    if options.workers is not None:
        cores = {} if devices else all_cores
        is_users = options.load is not LoadName.LAB
        memory = {"SHARDLINE_MEMORY_MIB": str(FLEET_MIB[options.dtype])} if is_users else {}
        return {"SHARDLINE_WORKERS": str(options.workers), **cores, **memory, **ranks, **devices}
    if devices:
        return devices
    cores = all_cores if ranks else {}
    return {
        "SHARDLINE_STAGES": str(options.stages),
        "SHARDLINE_REPLICAS": str(options.replicas),
        **cores,
        **ranks,
    }


def composed_redis() -> Mapping[str, str]:
    """How much memory Compose's Redis may take, and what it does then."""
    found = dict(
        re.findall(r"--(maxmemory(?:-policy)?) (\S+)", (REPOSITORY / "compose.yaml").read_text())
    )
    assert found.keys() == {"maxmemory", "maxmemory-policy"}, found
    return found


def _serve(ending: ExitStack, folder: Path, of_redis: Mapping[str, str]) -> Servers:
    postgres = Postgres(folder, settings=FAST)
    ending.callback(postgres.kill)
    postgres.start()
    valkey = Valkey(folder, settings={**DEBUG, **of_redis})
    ending.callback(valkey.kill)
    valkey.start()
    return Servers(
        postgres=postgres,
        redis=valkey,
        database_proxy=_proxy(ending, postgres.socket),
        redis_proxy=_proxy(ending, (LOOPBACK, valkey.port)),
    )


def _results(ending: ExitStack, home: Path) -> ResultBackend:
    """A Redis of its own: faults empty the other one, with all its databases."""
    valkey = Valkey(home)
    ending.callback(valkey.kill)
    valkey.start()
    return ResultBackend(url=valkey.url, home=home)


def _stack(ending: ExitStack, folder: Path, **settings: str) -> Stack:
    """Ends with the target."""
    stack = Stack(folder, **settings)
    folder.mkdir()
    ending.callback(stack.end)
    stack.start()
    return stack


def _unlike(ending: ExitStack, stack: Stack, options: Options) -> list[FleetWorker]:
    """With the environment of the fleet's first worker."""
    if not options.more_dtypes:
        return []
    pids: Mapping[str, int] = stack.look()["processes"]
    environment = psutil.Process(
        next(pid for name, pid in pids.items() if name.startswith("worker-"))
    ).environ()
    made = [
        FleetWorker(f"unlike-{place}", stack.home.folder, {**environment, "SHARDLINE_DTYPE": dtype})
        for place, dtype in enumerate(options.more_dtypes)
    ]
    for worker in made:
        ending.callback(worker.end)
        worker.start()
    return made


def _second(ending: ExitStack, folder: Path, options: Options, shared: Mapping[str, str]) -> Stack:
    """One pipeline of one stage, on the same Postgres and Redis, with another model."""
    model = folder / "model" / SCRIBE.name
    if options.load is LoadName.ENCODERS:
        _run("encoder_models", "score", str(model))
    else:
        _run("second_model", str(model))
    kv_mib = SECOND_KV_MIB[options.dtype]
    own = {"SHARDLINE_MODEL": str(model), "SHARDLINE_STAGES": "1", "SHARDLINE_KV_MIB": str(kv_mib)}
    return _stack(
        ending, folder / "second", **{**shared, **own, **_adapters(model, options.adapters)}
    )


def _first_model(options: Options, model: Path) -> None:
    """Of its own: it may be damaged."""
    if options.load is LoadName.ENCODERS and options.model is None:
        _run("encoder_models", "embed", str(model))
    else:
        shutil.copytree(options.model or CLERK_FOLDER, model)


def _adapters(model: Path, num: int) -> Mapping[str, str]:
    """More adapters of a model than its stages hold at once."""
    if num == 0:
        return {}
    folder = _adapters_of(model)
    _run("adapters", str(model), str(folder), str(num))
    return {"SHARDLINE_ADAPTERS_DIR": str(folder), "SHARDLINE_ADAPTERS": str(max(1, num // 2))}


def _adapters_of(model: Path) -> Path:
    return model.with_name(f"{model.name}-adapters")


def _run(module: str, *arguments: str) -> None:
    """In a process of its own: this one knows no torch."""
    argv = [sys.executable, "-m", f"tests.chaos.stack.{module}", *arguments]
    subprocess.run(argv, cwd=REPOSITORY, check=True)


@contextmanager
def _preloaded(clock: Clock, disk: Disk) -> Iterator[str]:
    """Servers and services preload both; gives what stages preload, which is these and their
    allocator."""
    shims = [shim for shim in (clock, disk) if shim.why_not is None]
    libraries = [shim.library for shim in shims]
    environment = {name: value for shim in shims for name, value in shim.environment.items()}
    with preloaded(libraries, environment):
        yield ":".join(filter(None, (*map(str, libraries), preload(StandaloneSettings()))))


def _proxy(ending: ExitStack, target: tuple[str, int] | str) -> Proxy:
    """What every service reaches this server through."""
    proxy = Proxy(target)
    proxy.start()
    ending.callback(proxy.stop)
    return proxy


def _keep_logs(folder: Path) -> None:
    """The last run's logs are the evidence of what it found."""
    shutil.rmtree(LOGS_KEPT, ignore_errors=True)
    for name in (*STACKS, SERVERS, RESULTS):
        if (folder / name / "logs").exists():
            shutil.copytree(folder / name / "logs", LOGS_KEPT / name)
        if (folder / name / "output").exists():
            shutil.copy(folder / name / "output", LOGS_KEPT / f"supervisor-{name}.log")
    shutil.rmtree(folder, ignore_errors=True)
