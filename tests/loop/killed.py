"""Two models in room for one that keep what they compute on disk: `python killed.py DIRECTORY NAME…`.

Says each answer, as a line of JSON, when it is on disk, and then waits to be killed.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.loop.restarts import words
from tests.loop.several import on_disk, serving_one_at_a_time


def main() -> None:
    directory, *names = sys.argv[1:]
    with serving_one_at_a_time(*names, **on_disk(Path(directory))) as models:
        for seed, model in enumerate(models):
            tokens = model.ready().submit(words(seed, 200), num=6).wait().tokens
            model.loop.hurry()
            while (seen := model.inspect()).num_unwritten > 0 or seen.disk is None or seen.disk.queued_nbytes > 0:
                time.sleep(0.005)
            print(json.dumps(tokens), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
