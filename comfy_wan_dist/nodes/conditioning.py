"""WanDistSaveConditioning and WanDistLoadConditioning: a prompt encoded once needs its encoder no more."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.conditioning import Conditioning, prompt_embedding
from ..comfyui.folders import conditioning_path, list_conditioning, new_output_path
from ..model_file import conditioning as conditioning_file
from .load_model import CATEGORY


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
        embedding = prompt_embedding(
            conditioning, label="given", text_dim=conditioning_file.TEXT_DIM
        )
        path, name, subfolder = new_output_path(filename_prefix, ".safetensors")
        conditioning_file.save(path, embedding)
        saved = {"filename": name, "subfolder": subfolder, "type": "output"}
        return io.NodeOutput(ui={"files": [saved]})


class LoadConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistLoadConditioning",
            display_name="Wan Dist Load Conditioning",
            category=CATEGORY,
            description="Load a prompt's embedding that Wan Dist Save Conditioning wrote. No text encoder is needed.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=list_conditioning(),
                    tooltip="A .safetensors file in ComfyUI's input or output folder.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        status = conditioning_path(file).stat()
        return f"{status.st_size}-{status.st_mtime_ns}"

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        embedding = conditioning_file.load(conditioning_path(file))
        return io.NodeOutput([[embedding, {"pooled_output": None}]])
