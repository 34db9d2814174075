"""Chooses the executor of an engine. Imports Ray only where it is used."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.executor.abstract import Executor
from engine.executor.multiproc_executor import MultiprocExecutor
from host.life_signs import LifeSigns
from host.sockets.local_socket import Context


def create_executor(
    config: EngineConfig, context: Context, signs: LifeSigns | None = None
) -> Executor:
    """Builds the executor that `--distributed-executor-backend` names. Raises EngineDeadError when
    Ray is not installed.
    """
    if config.parallel.distributed_executor_backend == "mp":
        return MultiprocExecutor(config, context, signs=signs)
    try:
        from engine.executor.ray.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise EngineDeadError(
            "the executor backend ray needs Ray on every host: pip install 'tandem[ray]'"
        ) from error
    return RayExecutor(config, context, signs=signs)
