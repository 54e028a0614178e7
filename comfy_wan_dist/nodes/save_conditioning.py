"""WanDistSaveConditioning: a prompt's embedding as a file, so that its encoder is needed no more."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.conditioning import Conditioning, prompt_embedding
from ..comfyui.folders import new_output_path
from ..model_file import conditioning as conditioning_file
from .inputs import CATEGORY, validate_types


class SaveConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistSaveConditioning",
            display_name="Wan Dist Save Conditioning",
            category=CATEGORY,
            description="Save a prompt's embedding to the output folder, so that later graphs can load it "
            "instead of the text encoder.",
            inputs=[
                io.Conditioning.Input(
                    "conditioning", tooltip="From CLIPTextEncode with the umT5 encoder."
                ),
                io.String.Input(
                    "filename_prefix",
                    default="conditioning/prompt",
                    tooltip="Folder and name under ComfyUI's output folder; a number is added.",
                ),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, conditioning: Conditioning, filename_prefix: str) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        embedding = prompt_embedding(
            conditioning, label="given", text_dim=conditioning_file.TEXT_DIM
        )
        path, name, subfolder = new_output_path(filename_prefix, ".safetensors")
        conditioning_file.save(path, embedding)
        saved = {"filename": name, "subfolder": subfolder, "type": "output"}
        return io.NodeOutput(ui={"files": [saved]})
