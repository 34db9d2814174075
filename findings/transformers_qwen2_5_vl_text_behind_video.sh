#!/usr/bin/env bash
# transformers 5.24.0: text behind a video of Qwen2.5-VL has positions that the video's frames have, too.
#
# A video's frames count time in the first axis of positions, two a second as published; text goes on behind the largest
# position of all three axes (arXiv 2409.12191; transformers 4.57.1 does). 5.24.0 goes on behind the longer side of a
# frame: after some seconds of video the text stands amid its times. The delta for tokens that are generated still counts
# from the largest position, so the first of them is as far from the prompt's last as the video was long.
#
# Seen on 2026-11-29 with Python 3.11, torch 2.13 (CPU); 6 pairs of frames of 2 x 2 tokens, a second apart:
#     4.57.1: video 0 .. 10, text 11 12 13, generated 14
#     5.24.0: video 0 .. 10, text 2 3 4, generated 11
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" 'torch==2.13.0' pillow
for version in 4.57.1 5.24.0; do
    "${pip[@]}" --target "$folder/$version" "transformers==$version"
done
cd "$folder"
cat > run.py <<'PYTHON'
import inspect

import torch
from transformers import Qwen2_5_VLConfig, __version__
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}
text = {**sizes, "num_key_value_heads": 2, "vocab_size": 128, "rope_scaling": rope}
vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
video, start, end = 100, 101, 102
tokens = {"video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": 103}
config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "tokens_per_second": 2}, **tokens)
with torch.device("meta"):
    model = Qwen2_5_VLModel(config)
ids = torch.tensor([[start, *[video] * 24, end, 7, 8]])
asked = {"video_grid_thw": torch.tensor([[6, 4, 4]]), "second_per_grid_ts": torch.tensor([1.0])}
if "mm_token_type_ids" in inspect.signature(model.get_rope_index).parameters:
    asked["mm_token_type_ids"] = (ids == video).int() * 2
positions, delta = model.get_rope_index(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
first = positions[0, 0] - 1  # the token before the video has position 0
seen = f"video {first[1]} .. {first[24]}, text {' '.join(map(str, first[25:].tolist()))}"
print(f"{__version__}: {seen}, generated {ids.shape[1] + int(delta) - 1}")
PYTHON
for version in 4.57.1 5.24.0; do
    PYTHONPATH="$folder/$version" venv/bin/python run.py 2>/dev/null
done | tee seen
diff seen - <<'SEEN'
4.57.1: video 0 .. 10, text 11 12 13, generated 14
5.24.0: video 0 .. 10, text 2 3 4, generated 11
SEEN
