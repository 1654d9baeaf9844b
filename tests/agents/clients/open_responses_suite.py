"""Sends the bodies of Open Responses' acceptance suite, and judges the replies by the schemas inside llm-comply.

Reads the table of tests from its input, and prints what is wrong with each, by its id. Usage: URL MODEL
"""

import json
import sys
from pathlib import Path
from typing import Any

import llm_comply
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase, TestCategory
from llm_comply.validators import completed_status, has_output, has_output_type, streaming_has_events

url, model = sys.argv[1:]
specification = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "openresponses.json"))
config = ComplianceConfig(base_url=f"{url}/v1", api_key="none", model=model, verbose=True)
runner = TestRunner(config, [], specification)


def result_of(test: dict[str, Any], body: dict[str, Any]) -> Any:
    schema, kind, is_stream = test["schema"], test.get("has"), test.get("stream", False)
    validators = [*([has_output] if schema else []), *([completed_status] if schema == "ResponseResource" else [])]
    validators += [*([has_output_type(kind)] if kind else []), *([streaming_has_events] if is_stream else [])]
    case = TestCase(
        id="",
        name="",
        description="",
        category=TestCategory.BASIC,
        build_request=lambda _: body,
        validators=validators,
        streaming=is_stream,
        endpoint=test["endpoint"],
        expected_statuses=[200] if schema else [400, 422],
        schema_name=schema,
    )
    return runner.run_one(case)


def complaints(test: dict[str, Any]) -> list[str]:
    found: list[str] = []
    last: dict[str, Any] = {}
    for turn in test["turns"]:
        call_id = next((item["call_id"] for item in last.get("output", ()) if "call_id" in item), "")
        body = json.dumps(turn).replace("$RESPONSE", last.get("id", "")).replace("$CALL", call_id)
        result = result_of(test, json.loads(body.replace("$MODEL", model)))
        last = result.response if isinstance(result.response, dict) else {}
        told = {event["type"] for event in result.stream_events or ()}
        found += [*result.errors, *result.warnings]
        found += [f"no event {kind}" for kind in test.get("events", ()) if kind not in told]
    return found


print(json.dumps({name: complaints(test) for name, test in json.load(sys.stdin).items()}))
