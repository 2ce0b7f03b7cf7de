"""Serves prompts over a stored cache, one line of output each, until it is killed: `python crash_process.py FOLDER`."""

import importlib.util
import itertools
import sys
from pathlib import Path


def main(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("cache_tools", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    tools = sys.modules["cache_tools"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    volume = tools.Volume(folder)
    volume.probe()
    rig = tools.Rig(backend=volume, device_pages=64, host_pages=64)
    for number in itertools.count():
        rig.run(tools.numbered_prompt(number))
        if number % 8 == 7:
            rig.settle()  # or storage could not keep up, and leave pages out
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
