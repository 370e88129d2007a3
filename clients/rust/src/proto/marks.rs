// @generated from the options of headrace/v1/*.proto by scripts/generate-rust.sh

use crate::capability::Mark;

pub(crate) static ACCEPTED: &[Mark] = &[
    // stop
    Mark { field: 3, capability: "", values: &[], inner: STOP_OPTIONS },
];

pub(crate) static ADD_COMMAND: &[Mark] = &[
    // spec
    Mark { field: 1, capability: "", values: &[], inner: GENERATION_SPEC },
];

pub(crate) static ADD_REQUEST_REQUEST: &[Mark] = &[
    // spec
    Mark { field: 1, capability: "", values: &[], inner: GENERATION_SPEC },
];

pub(crate) static ADD_REQUEST_RESPONSE: &[Mark] = &[
    // accepted
    Mark { field: 2, capability: "", values: &[], inner: ACCEPTED },
];

pub(crate) static CHAT_INPUT: &[Mark] = &[
    // messages
    Mark { field: 1, capability: "", values: &[], inner: CHAT_MESSAGE },
    // tools
    Mark { field: 2, capability: "tools", values: &[], inner: &[] },
    // tool_choice
    Mark { field: 6, capability: "tool_choice", values: &[], inner: &[] },
];

pub(crate) static CHAT_MESSAGE: &[Mark] = &[
    // content_parts
    Mark { field: 7, capability: "content_parts", values: &[], inner: CONTENT_PARTS },
    // tool_calls
    Mark { field: 4, capability: "tools", values: &[], inner: &[] },
];

pub(crate) static CONTENT_PART: &[Mark] = &[
    // image
    Mark { field: 2, capability: "image_input", values: &[], inner: &[] },
    // audio
    Mark { field: 3, capability: "audio_input", values: &[], inner: &[] },
    // video
    Mark { field: 4, capability: "video_input", values: &[], inner: &[] },
];

pub(crate) static CONTENT_PARTS: &[Mark] = &[
    // parts
    Mark { field: 1, capability: "", values: &[], inner: CONTENT_PART },
];

pub(crate) static GENERATE_REQUEST: &[Mark] = &[
    // spec
    Mark { field: 1, capability: "", values: &[], inner: GENERATION_SPEC },
];

pub(crate) static GENERATE_RESPONSE: &[Mark] = &[
    // accepted
    Mark { field: 2, capability: "", values: &[], inner: ACCEPTED },
];

pub(crate) static GENERATE_STREAM_REQUEST: &[Mark] = &[
    // spec
    Mark { field: 1, capability: "", values: &[], inner: GENERATION_SPEC },
];

pub(crate) static GENERATE_STREAM_RESPONSE: &[Mark] = &[
    // events
    Mark { field: 1, capability: "", values: &[], inner: RESULT_EVENT },
];

pub(crate) static GENERATION_SPEC: &[Mark] = &[
    // chat
    Mark { field: 4, capability: "chat", values: &[], inner: CHAT_INPUT },
    // stop
    Mark { field: 6, capability: "", values: &[], inner: STOP_OPTIONS },
    // structured_output
    Mark { field: 8, capability: "structured_output", values: &[], inner: STRUCTURED_OUTPUT },
    // scheduling
    Mark { field: 9, capability: "", values: &[], inner: SCHEDULING_OPTIONS },
    // adapter
    Mark { field: 12, capability: "adapters", values: &[], inner: &[] },
    // prediction
    Mark { field: 16, capability: "prediction", values: &[], inner: &[] },
];

pub(crate) static GET_RESULT_RESPONSE: &[Mark] = &[
    // events
    Mark { field: 1, capability: "", values: &[], inner: RESULT_EVENT },
];

pub(crate) static RESULT_EVENT: &[Mark] = &[
    // accepted
    Mark { field: 4, capability: "", values: &[], inner: ACCEPTED },
];

pub(crate) static SCHEDULING_OPTIONS: &[Mark] = &[
    // priority
    Mark { field: 1, capability: "priorities", values: &[], inner: &[] },
];

pub(crate) static STOP_OPTIONS: &[Mark] = &[
    // max_reasoning_tokens
    Mark { field: 8, capability: "reasoning_budget", values: &[], inner: &[] },
];

pub(crate) static STREAM_RESULT_REQUEST: &[Mark] = &[
    // add
    Mark { field: 3, capability: "", values: &[], inner: ADD_COMMAND },
];

pub(crate) static STREAM_RESULT_RESPONSE: &[Mark] = &[
    // events
    Mark { field: 1, capability: "", values: &[], inner: RESULT_EVENT },
];

pub(crate) static STRUCTURED_OUTPUT: &[Mark] = &[
    // structural_tag
    Mark { field: 6, capability: "structural_tag", values: &[], inner: &[] },
];

pub(crate) static TOKENIZE_REQUEST: &[Mark] = &[
    // chat
    Mark { field: 2, capability: "", values: &[], inner: CHAT_INPUT },
];
