"""The processor that is assembled without torchvision against the library's own, where torchvision is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMPARE = """
import importlib
import sys
from pathlib import Path
import torch

# torchvision as built for another torch registers operators that are not there; its transforms need none of them.
register = torch.library.register_fake
torch.library.register_fake = lambda name, *rest, **options: (
    (lambda function: function) if str(name).startswith("torchvision::") else register(name, *rest, **options)
)
import torchvision
torch.library.register_fake = register

import numpy as np
from rondo.models.families import family_of
from rondo.models.load import empty_model
from rondo.models.media.config import MediaConfig
from rondo.models.media.library import has_torchvision, load_library
from rondo.models.media.processor import Processor
from rondo.models.media.refs import MediaRef
from tests.models.media.builders import image_bytes, sound_bytes, video_bytes

assert has_torchvision()
work = Path(sys.argv[2])
path = str(work / "model")
importlib.import_module(f"rondo.models.tiny.{sys.argv[1]}").build(Path(path))
config = MediaConfig(video_min_tokens=1, video_max_tokens=12, image_max_tokens=64)
model = empty_model(path)
refs = [
    MediaRef("image", image_bytes()),
    MediaRef("video", video_bytes(work, 20)),
    MediaRef("video", [image_bytes(64, 48)] * 3),
]
if "audio" in family_of(model).modalities:
    refs += [MediaRef("audio", sound_bytes(0.7)), MediaRef("video", video_bytes(work, 40, sound=True), use_audio=True)]
prompt = [{"role": "user", "content": [{"type": ref.kind} for ref in refs]}]
whole, assembled = (
    Processor(load_library(path, whole=choice), family_of(model), model, config, whole=choice).prepare(prompt, refs)
    for choice in (True, False)
)
assert whole.tokens.tolist() == assembled.tokens.tolist()
assert set(whole.media.arrays) == set(assembled.media.arrays)
for name, array in whole.media.arrays.items():
    np.testing.assert_allclose(assembled.media.arrays[name], array, atol=1e-6, err_msg=name)
print("equal", sorted(whole.media.arrays))
"""


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_omni"])
def test_the_assembled_processor_makes_what_the_library_makes(family: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE, family, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "equal"
