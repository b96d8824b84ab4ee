"""Writing compiled programs to a file that the environment names."""

from __future__ import annotations

import json
from pathlib import Path

from .._base import env, log
from .._ir import graph_json
from .._ir.plan import Plan

DEFAULT_NAME = "model.proto"


def export(plan: Plan) -> None:
    """Write a plan where POPTORCH_EXPORT_PROTO_FILE says, if it does.

    As text for people, or with POPTORCH_EXPORT_PROTO_AS_BINARY as JSON for programs.
    """
    name = env.get("POPTORCH_EXPORT_PROTO_FILE")
    if not name:
        return
    path = Path(name)
    if path.is_dir():
        path = path / DEFAULT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    as_json = env.get("POPTORCH_EXPORT_PROTO_AS_BINARY")
    path.write_text(json.dumps(graph_json.encode(plan)) if as_json else plan.describe() + "\n")
    log.engine.info("From POPTORCH_EXPORT_PROTO_FILE environment variable: wrote %s", path)
