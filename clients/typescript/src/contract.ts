/**
 * The messages of the contract, for what the library does not cover: `import … from "@headrace/client/contract"`.
 *
 * @packageDocumentation
 */
export * from "./gen/headrace/v1/control_service_pb.js";
export * from "./gen/headrace/v1/generation_pb.js";
export * from "./gen/headrace/v1/generation_service_pb.js";
export * from "./gen/headrace/v1/model_service_pb.js";
