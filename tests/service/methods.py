"""All methods of the service: their messages, and who streams."""

from __future__ import annotations

from google.protobuf.message_factory import GetMessageClass
from headrace.v1 import control_service_pb2, generation_service_pb2, model_service_pb2

SERVICES = [
    file.DESCRIPTOR.services_by_name[name]
    for file, name in (
        (generation_service_pb2, "GenerationService"),
        (model_service_pb2, "ModelService"),
        (control_service_pb2, "ControlService"),
    )
]
METHODS = {
    f"/{service.full_name}/{method.name}": (
        GetMessageClass(method.input_type),
        method.client_streaming,
        method.server_streaming,
    )
    for service in SERVICES
    for method in service.methods
}
