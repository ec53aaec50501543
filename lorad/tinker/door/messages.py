"""Builds the protobuf messages of the official client from a table: no generated file, no `tinker` package.

Field numbers are those of tinker 0.38.0 (`tinker.proto.tinker_public_pb2.DESCRIPTOR`), with which
`tests/tinker/real` compares them.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tinker_public"
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
MESSAGES = {
    "SparseCsr": "values=1:bytes crow_indices=2:bytes col_indices=3:bytes",
    "Tensor": "dense=1:bytes@encoding sparse_csr=2:SparseCsr@encoding dtype=3:DType shape=4:*int64",
    "TopkLogprobs": "token_ids=1:bytes logprobs=2:bytes k=3:uint32 length=4:uint32",
    "PromptAltTokens": "tokens=1:Tensor logprobs=2:Tensor",
    "SampledSequence": "stop_reason=1:StopReason tokens=2:bytes logprobs=3:?bytes "
    "topk_sampled_logprobs=4:?TopkLogprobs",
    "SampleResponse": "sequences=1:*SampledSequence prompt_logprobs=2:?bytes "
    "topk_prompt_logprobs=3:?TopkLogprobs prompt_cache_hit_tokens=4:int32 "
    "target_prompt_logprobs=5:?Tensor prompt_alt_tokens=6:?PromptAltTokens",
    "BatchedTensor": "data=1:bytes offsets=2:bytes dtype=3:DType trailing_shape=4:*int64",
    "ArrayRecord": "type_tag=1:string fields=2:<BatchedTensor> num_datums=3:int64",
    "ForwardBackwardOutput": "loss_fn_output_type=1:string loss_fn_outputs=2:*ArrayRecord metrics=3:<double>",
    "LossConfigValue": "number=1:double@value text=2:string@value",
    "EncodedTextChunk": "tokens=1:bytes",
    "ImageChunk": "data=1:bytes format=2:string expected_tokens=3:?int32",
    "DmelChunk": "dmel=1:bytes",
    "Chunk": "encoded_text=1:EncodedTextChunk@chunk image=2:ImageChunk@chunk dmel=3:DmelChunk@chunk",
    "ProvenanceSpan": "",
    "Datum": "model_input=1:*Chunk loss_fn_inputs=2:<Tensor> model_input_spans=3:*ProvenanceSpan "
    "loss_fn_input_spans=4:*ProvenanceSpan",
    "ForwardBackwardRequest": "model_id=1:string seq_id=2:int32 data=3:*Datum loss_fn=4:string "
    "loss_fn_config=5:<double> forward_only=6:bool loss_fn_config_v2=7:<LossConfigValue>",
}
"""The fields of each message, `name=number:type`.

In a type, `*` is repeated, `?` has presence, `<T>` is map<string, T>, and `T@x` is a member of the oneof x.
"""
_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_F, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "int32", "int64", "uint32", "double", "bool")
}


def _with_type(field: Any, kind: str) -> Any:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _F.TYPE_ENUM if kind in _ENUMS else _F.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    return field


def _add_message(file: Any, name: str, fields: str) -> None:
    message = file.message_type.add(name=name)
    oneofs: list[str] = []
    with_presence = []
    for text in fields.split():
        numbered, kind = text.split(":")
        key, number = numbered.split("=")
        kind, _, oneof = kind.partition("@")
        if kind[0] == "<":  # a map is a repeated message of keys and values
            entry = message.nested_type.add(name=key.title().replace("_", "") + "Entry")
            entry.options.map_entry = True
            _with_type(entry.field.add(name="key", number=1, label=_F.LABEL_OPTIONAL), "string")
            _with_type(entry.field.add(name="value", number=2, label=_F.LABEL_OPTIONAL), kind[1:-1])
            field = message.field.add(name=key, number=int(number), label=_F.LABEL_REPEATED)
            field.type = _F.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
            continue
        label = _F.LABEL_REPEATED if kind[0] == "*" else _F.LABEL_OPTIONAL
        field = message.field.add(name=key, number=int(number), label=label)
        _with_type(field, kind.lstrip("*?"))
        if kind[0] == "?":
            with_presence.append(field)
        if oneof:
            if oneof not in oneofs:
                oneofs.append(oneof)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs.index(oneof)
    for field in with_presence:  # in a oneof each, which come after all others
        field.oneof_index = len(message.oneof_decl)
        field.proto3_optional = True
        message.oneof_decl.add(name=f"_{field.name}")


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="lorad_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        _add_message(file, name, fields)
    pool = descriptor_pool.DescriptorPool()  # its own, so that the client's may be in the same process
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in MESSAGES
    }


M = _build()
FLOAT32 = 1
INT64 = 2
INT32 = 3
