"""Which engine a wrapper talks to: one per configuration and process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pcr_core import ConfigError, EngineConfig

if TYPE_CHECKING:
    from pcr_core import Engine


def _build(config: EngineConfig) -> Engine:
    from pcr_core import Engine  # here, so that importing a wrapper loads no torch

    return Engine(config)


class _Slot:
    """Where one configuration's engine lives, with the lock that builds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None


class EngineRegistry:
    """Engines by configuration. All methods may be called from any thread.

    Args:
        build: Makes an engine from a configuration; slow, called under a lock of
            that configuration only, so that two different models load side by side.
    """

    def __init__(self, build: Callable[[EngineConfig], Engine] = _build) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._slots: dict[EngineConfig, _Slot] = {}
        self._inherited: list[_Slot] = []

    def get(self, config: EngineConfig) -> Engine:
        """Return the engine of ``config``; build it if there is none, or it is closed.

        Raises:
            PcrError: Whatever building it raised; the next call tries again.
        """
        with self._lock:
            slot = self._slots.setdefault(_key(config), _Slot())
        with slot.lock:
            if slot.engine is None or slot.engine.closed:
                slot.engine = None
                slot.engine = self._build(config)
            return slot.engine

    def find(self, config: EngineConfig) -> Engine | None:
        """Return the engine of ``config`` if it is open; never builds or waits."""
        with self._lock:
            slot = self._slots.get(_key(config))
        engine = slot.engine if slot is not None else None
        return None if engine is None or engine.closed else engine

    def close(self) -> None:
        """Close every engine; later calls of ``get`` build new ones."""
        with self._lock:
            slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            with slot.lock:
                if slot.engine is not None:
                    slot.engine.close()

    def forget_parent(self) -> None:
        """In a forked child: start empty, with new locks.

        The parent's engines are kept referenced, unused: finalising them here could
        touch files and threads that belong to the parent.
        """
        self._inherited += self._slots.values()
        self._lock = threading.Lock()
        self._slots = {}


def _key(config: EngineConfig) -> EngineConfig:
    """``~`` and the folder it stands for are the same cache."""
    return config.model_copy(update={"cache_dir": config.cache_path})


_ENGINES = EngineRegistry()
atexit.register(_ENGINES.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ENGINES.forget_parent)


def check_settings(engine: Engine | None, settings: Mapping[str, Any]) -> None:
    """Check an ``engine=`` and the ``EngineConfig`` fields given beside it.

    Raises:
        ConfigError: For a bad or unknown setting, or for settings beside an engine,
            which was configured when it was built.
    """
    if engine is not None and not hasattr(engine, "config"):
        raise ConfigError(
            f"engine= takes an Engine, not {type(engine).__name__}; write "
            "engine=Engine(EngineConfig(...)), or give EngineConfig fields instead"
        )
    if engine is None:
        EngineConfig(**settings)
    elif settings:
        names = ", ".join(sorted(settings))
        raise ConfigError(
            f"engine= was given together with {names}; an engine is configured when "
            "it is built, so pass either engine= or EngineConfig fields"
        )


def engine_for(engine: Engine | None, settings: Mapping[str, Any]) -> Engine:
    """Return ``engine`` if given, else the one shared by all with these settings.

    Args:
        engine: An engine the caller built and will close.
        settings: ``EngineConfig`` fields. Equal configurations in one process share
            one engine; it is built on first use (seconds: the model is loaded) and
            closed when the interpreter exits.

    Raises:
        ConfigError: See ``check_settings``.
        PcrError: If the engine cannot be built.
    """
    check_settings(engine, settings)
    return _ENGINES.get(EngineConfig(**settings)) if engine is None else engine


def open_engine_for(
    engine: Engine | None, settings: Mapping[str, Any]
) -> Engine | None:
    """As ``engine_for``, but ``None`` where the engine is yet to be built."""
    return _ENGINES.find(EngineConfig(**settings)) if engine is None else engine
