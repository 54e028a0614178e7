"""WanDistLoadConditioning: a prompt's embedding from a file that Wan Dist Save Conditioning wrote."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.folders import conditioning_path, list_conditioning
from ..model_file import conditioning as conditioning_file
from .inputs import CATEGORY, validate_types


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
    def fingerprint_inputs(cls, file: str | None) -> str:
        if file is None:  # linked
            return ""
        status = conditioning_path(file).stat()
        return f"{status.st_size}-{status.st_mtime_ns}"

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        embedding = conditioning_file.load(conditioning_path(file))
        return io.NodeOutput([[embedding, {"pooled_output": None}]])
