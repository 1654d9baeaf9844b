"""A Ray cluster of one small machine with replicas on it: ``python -m tests.deploy.cluster PORT key=value…``

A process of its own, since Ray's import and its threads are not what a test's process should have. Reads commands from
standard input, and says `done` after each: `deploy key=value…`, `kill REPLICA` and `delete`. Ends with its input.
"""

import os
import sys
from typing import Any

os.environ |= {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import ray
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

import reprise.cluster.replicas

APPLICATION = "reprise"


def main(port: int, arguments: list[str]) -> None:
    """Until standard input ends."""
    ray.init(
        num_cpus=4,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=True,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(arguments)
        say("done")
        for line in sys.stdin:
            verb, *rest = line.split()
            if verb == "deploy":
                deploy(rest)
            elif verb == "kill":
                kill(*rest)
            else:
                serve.delete(APPLICATION)
            say("done")
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(arguments: list[str]) -> None:
    """As `serve run reprise.cluster.replicas:build key=value…`."""
    given: dict[str, Any] = dict(each.split("=", 1) for each in arguments)
    build = getattr(reprise.cluster.replicas, "build")  # noqa: B009 (as Ray gets it)
    serve.run(call_user_app_builder_with_args_if_necessary(build, given), name=APPLICATION)


def kill(replica: str) -> None:
    """As a machine that is gone."""
    named = ray.util.list_named_actors(all_namespaces=True)
    (actor,) = [each for each in named if each["name"].endswith(f"#{replica}")]
    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def say(word: str) -> None:
    """To whoever started this."""
    print(f"cluster: {word}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
