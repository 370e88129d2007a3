// The conformance suite's driver of the example of a session: tests/conformance/README.md. It has the commands that
// a session of text, conversations aside, needs, and those of adapters.
#include <atomic>
#include <cmath>
#include <functional>
#include <iostream>
#include <sstream>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "google/rpc/error_details.pb.h"
#include "headrace/session.h"
#include "headrace/v1/control_service.grpc.pb.h"
#include "headrace/v1/model_service.grpc.pb.h"

namespace {

using google::protobuf::Struct;
using headrace::example::Request;
using headrace::example::Session;
namespace v1 = headrace::v1;

std::string Quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (const unsigned char one : text) {
    if (one == '"' || one == '\\') {
      out << '\\' << one;
    } else if (one < 0x20) {
      char escaped[8];
      snprintf(escaped, sizeof escaped, "\\u%04x", one);
      out << escaped;
    } else {
      out << one;
    }
  }
  out << '"';
  return out.str();
}

template <typename Items, typename Tell>
std::string List(const Items& items, Tell tell) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + tell(item);
  return out + "]";
}

std::string Numbers(const google::protobuf::RepeatedField<uint32_t>& ids) {
  return List(ids, [](uint32_t id) { return std::to_string(id); });
}

std::string TellUsage(const v1::Usage& usage) {
  return "{\"prompt_tokens\":" + std::to_string(usage.prompt_tokens()) +
         ",\"cached_tokens\":" + std::to_string(usage.cached_tokens()) +
         ",\"completion_tokens\":" + std::to_string(usage.completion_tokens()) +
         ",\"reasoning_tokens\":" + std::to_string(usage.reasoning_tokens()) +
         ",\"draft_tokens\":" + std::to_string(usage.draft_tokens()) +
         ",\"accepted_draft_tokens\":" + std::to_string(usage.accepted_draft_tokens()) +
         ",\"prediction_draft_tokens\":" + std::to_string(usage.prediction_draft_tokens()) +
         ",\"accepted_prediction_draft_tokens\":" +
         std::to_string(usage.accepted_prediction_draft_tokens()) + "}";
}

std::string TellChunk(const v1::ResultEvent& event) {
  return "{\"choice\":" + std::to_string(event.choice_index()) + ",\"text\":" + Quoted(event.delta().text()) +
         ",\"reasoning\":" + Quoted(event.delta().reasoning()) +
         ",\"token_ids\":" + Numbers(event.delta().token_ids()) + "}";
}

const char* Reason(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP: return "stop";
    case v1::FINISH_REASON_LENGTH: return "length";
    case v1::FINISH_REASON_CONTEXT: return "context";
    case v1::FINISH_REASON_CANCELLED: return "cancelled";
    case v1::FINISH_REASON_TIME_LIMIT: return "time_limit";
    case v1::FINISH_REASON_TOOL_CALLS: return "tool_calls";
    default: return "unknown";
  }
}

// RESULT of a request of one choice.
std::string TellResult(const Request& request) {
  std::string text, reasoning, digest, seed = "null";
  v1::Delta ids;
  v1::Finished finished;
  v1::PromptProcessed prompt;
  for (const auto& event : request.events()) {
    if (event.has_accepted()) {
      seed = Quoted(std::to_string(event.accepted().sampling().seed()));
      digest = event.accepted().adapter_digest();
    }
    if (event.has_prompt()) prompt = event.prompt();
    if (event.has_finished()) finished = event.finished();
    text += event.delta().text();
    reasoning += event.delta().reasoning();
    ids.mutable_token_ids()->MergeFrom(event.delta().token_ids());
  }
  v1::Usage whole = finished.usage();
  whole.set_prompt_tokens(std::max(whole.prompt_tokens(), prompt.prompt_tokens()));
  whole.set_cached_tokens(std::max(whole.cached_tokens(), prompt.cached_tokens()));
  const std::string matched =
      finished.has_stop_string()     ? ",\"stop_string\":" + Quoted(finished.stop_string())
      : finished.has_stop_token_id() ? ",\"stop_token_id\":" + std::to_string(finished.stop_token_id())
                                     : "";
  return "{\"request_id\":" + Quoted(request.id()) + ",\"seed\":" + seed +
         ",\"adapter_digest\":" + Quoted(digest) + ",\"usage\":" + TellUsage(whole) +
         ",\"choices\":[{\"index\":0,\"text\":" + Quoted(text) + ",\"reasoning\":" + Quoted(reasoning) +
         ",\"token_ids\":" + Numbers(ids.token_ids()) + ",\"finish_reason\":" + Quoted(Reason(finished.reason())) +
         matched + ",\"usage\":" + TellUsage(finished.usage()) + "}]}";
}

const char* State(v1::AdapterState state) {
  switch (state) {
    case v1::ADAPTER_STATE_LOADING: return "loading";
    case v1::ADAPTER_STATE_LOADED: return "loaded";
    case v1::ADAPTER_STATE_UNLOADING: return "unloading";
    default: return "unknown";
  }
}

std::string TellAdapter(const v1::Adapter& one) {
  return "{\"name\":" + Quoted(one.name()) + ",\"digest\":" + Quoted(one.digest()) +
         ",\"rank\":" + std::to_string(one.rank()) + ",\"bytes\":" + std::to_string(one.size_bytes()) +
         ",\"modules\":" + std::to_string(one.modules()) + ",\"state\":" + Quoted(State(one.state())) +
         ",\"pinned\":" + (one.pinned() ? "true" : "false") + ",\"live\":" + std::to_string(one.live_requests()) +
         ",\"base_model\":" + Quoted(one.base_model()) + "}";
}

const char* kCodes[] = {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
                        "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
                        "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"};

std::string TellError(const google::rpc::Status& status, const Request* request) {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  google::rpc::RetryInfo retry;
  std::string after = "null";
  for (const auto& detail : status.details()) {
    if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&info);
    if (detail.Is<google::rpc::BadRequest>()) detail.UnpackTo(&bad);
    if (detail.Is<google::rpc::RetryInfo>() && detail.UnpackTo(&retry)) {
      after = std::to_string(retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1000000);
    }
  }
  const std::string fields = List(bad.field_violations(), [](const auto& one) {
    return "{\"field\":" + Quoted(one.field()) + ",\"description\":" + Quoted(one.description()) + "}";
  });
  const std::string metadata = List(info.metadata(), [](const auto& one) {
    return Quoted(one.first) + ":" + Quoted(one.second);
  });
  const int code = status.code() >= 0 && status.code() <= 16 ? status.code() : 2;
  return "{\"code\":" + Quoted(kCodes[code]) + ",\"reason\":" + Quoted(info.reason()) +
         ",\"message\":" + Quoted(status.message()) + ",\"fields\":" + fields + ",\"retry_after_ms\":" + after +
         ",\"metadata\":{" + metadata.substr(1, metadata.size() - 2) + "}" +
         (request == nullptr ? ""
                             : ",\"request_id\":" + Quoted(request->id()) + ",\"partial\":" + TellResult(*request)) +
         "}";
}

// The error of a call that is no request's.
std::string TellCallError(const grpc::Status& end) {
  google::rpc::Status status;
  if (!status.ParseFromString(end.error_details()) || status.code() != end.error_code()) {
    status.set_code(end.error_code());
    status.set_message(end.error_message());
  }
  return "\"error\":" + TellError(status, nullptr);
}

class Driver {
 public:
  void Take(const std::string& line) {
    Struct command;
    if (!google::protobuf::util::JsonStringToMessage(line, &command).ok()) std::abort();
    const std::string op = Text(command, "op");
    if (op == "read" || op == "result" || op == "close_session" || op == "close_client" ||
        op == "load_adapter" || op == "unload_adapter" || op == "adapters") {
      waiting_.emplace_back([this, command, op] { Do(op, command); });
    } else {
      Do(op, command);
    }
  }

  // The end of the input: what is open is closed.
  void End() {
    for (auto& [name, session] : sessions_) session->Abort();
    for (auto& thread : waiting_) thread.join();
    requests_.clear();
    sessions_.clear();
  }

  static void Tell(const std::string& line) {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    std::cout << line << "\n" << std::flush;
  }

 private:
  static std::string Text(const Struct& from, const char* name) {
    const auto found = from.fields().find(name);
    return found == from.fields().end() ? "" : found->second.string_value();
  }

  static const google::protobuf::Value* Find(const Struct& from, const char* name) {
    const auto found = from.fields().find(name);
    return found == from.fields().end() || found->second.has_null_value() ? nullptr : &found->second;
  }

  void Do(const std::string& op, const Struct& command) {
    const auto id = std::to_string(static_cast<int64_t>(Find(command, "id")->number_value()));
    Tell("{\"id\":" + id + "," + Answer(op, command) + "}");
  }

  std::shared_ptr<Request> RequestOf(const Struct& command) {
    std::lock_guard lock(mutex_);
    return requests_.at(Text(command, "handle"));
  }

  std::string Answer(const std::string& op, const Struct& command) {
    if (op == "connect") {
      std::lock_guard lock(mutex_);
      const auto& target = Find(command, "targets")->list_value().values(0).string_value();
      channels_[Text(command, "client")] = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    } else if (op == "open_session") {
      std::lock_guard lock(mutex_);
      sessions_[Text(command, "session")] = std::make_shared<Session>(channels_.at(Text(command, "client")));
      clients_[Text(command, "session")] = Text(command, "client");
    } else if (op == "submit") {
      return Submit(command);
    } else if (op == "read") {
      return Read(command);
    } else if (op == "result") {
      const auto request = RequestOf(command);
      const auto status = request->Wait();
      if (status.code() != 0) return "\"error\":" + TellError(status, request.get());
      return "\"ok\":" + TellResult(*request);
    } else if (op == "load_adapter") {
      return Load(command);
    } else if (op == "unload_adapter") {
      return Unload(command);
    } else if (op == "adapters") {
      return Adapters(command);
    } else if (op == "cancel") {
      RequestOf(command)->Cancel();
    } else if (op == "close_session") {
      std::unique_lock lock(mutex_);
      const auto session = sessions_.at(Text(command, "session"));
      lock.unlock();
      session->Close();
    } else if (op == "close_client") {
      std::lock_guard lock(mutex_);
      for (auto it = clients_.begin(); it != clients_.end();) {
        if (it->second != Text(command, "client")) {
          ++it;
          continue;
        }
        sessions_.erase(it->first);
        it = clients_.erase(it);
      }
      channels_.erase(Text(command, "client"));
    } else {
      return "\"unsupported\":\"the example of a session has no such command\"";
    }
    return "\"ok\":{}";
  }

  std::shared_ptr<grpc::Channel> ChannelOf(const Struct& command) {
    std::lock_guard lock(mutex_);
    return channels_.at(Text(command, "client"));
  }

  static bool Flag(const Struct& from, const char* name) {
    const auto* found = Find(from, name);
    return found != nullptr && found->bool_value();
  }

  std::string Load(const Struct& command) {
    v1::LoadAdapterRequest request;
    request.set_name(Text(command, "name"));
    request.set_source(Text(command, "source"));
    request.set_pinned(Flag(command, "pinned"));
    request.set_replace(Flag(command, "replace"));
    grpc::ClientContext context;
    v1::LoadAdapterResponse answer;
    const auto end = v1::ControlService::NewStub(ChannelOf(command))->LoadAdapter(&context, request, &answer);
    if (!end.ok()) return TellCallError(end);
    return "\"ok\":{\"adapter\":" + TellAdapter(answer.adapter()) +
           ",\"evicted\":" + List(answer.evicted(), Quoted) + "}";
  }

  std::string Unload(const Struct& command) {
    v1::UnloadAdapterRequest request;
    request.set_name(Text(command, "name"));
    if (const auto* limit = Find(command, "timeout_ms")) {
      const auto millis = static_cast<int64_t>(limit->number_value());
      request.mutable_timeout()->set_seconds(millis / 1000);
      request.mutable_timeout()->set_nanos(static_cast<int32_t>(millis % 1000 * 1000000));
    }
    grpc::ClientContext context;
    v1::UnloadAdapterResponse answer;
    const auto end = v1::ControlService::NewStub(ChannelOf(command))->UnloadAdapter(&context, request, &answer);
    if (!end.ok()) return TellCallError(end);
    return "\"ok\":{\"live\":" + std::to_string(answer.live_requests()) + "}";
  }

  std::string Adapters(const Struct& command) {
    const auto stub = v1::ModelService::NewStub(ChannelOf(command));
    v1::ListAdaptersRequest request;
    google::protobuf::RepeatedPtrField<v1::Adapter> found;
    do {
      grpc::ClientContext context;
      v1::ListAdaptersResponse answer;
      if (const auto end = stub->ListAdapters(&context, request, &answer); !end.ok()) return TellCallError(end);
      found.MergeFrom(answer.adapters());
      request.set_page_token(answer.next_page_token());
    } while (!request.page_token().empty());
    return "\"ok\":{\"adapters\":" + List(found, TellAdapter) + "}";
  }

  std::string Submit(const Struct& command) {
    const Struct& told = Find(command, "request")->struct_value();
    v1::GenerationSpec spec;
    static std::atomic<int> made{0};
    const std::string id = Text(told, "id");
    spec.set_request_id(id.empty() ? "driver-made-" + std::to_string(++made) : id);
    if (const auto* ids = Find(told, "token_ids")) {
      for (const auto& one : ids->list_value().values()) {
        spec.mutable_tokens()->add_ids(static_cast<uint32_t>(one.number_value()));
      }
    } else {
      spec.mutable_text()->set_text(Text(told, "text"));
    }
    if (const auto* most = Find(told, "max_tokens")) {
      spec.mutable_stop()->set_max_tokens(static_cast<uint32_t>(most->number_value()));
    }
    std::vector<std::string> capabilities;
    if (const auto* adapter = Find(told, "adapter")) {
      spec.set_adapter(adapter->string_value());
      capabilities.push_back("adapters");
    }
    std::lock_guard lock(mutex_);
    const auto request = sessions_.at(Text(command, "session"))->Submit(spec, capabilities);
    if (request == nullptr) {
      google::rpc::Status status;
      status.set_code(grpc::StatusCode::UNAVAILABLE);
      status.set_message("the session takes no more requests");
      return "\"error\":" + TellError(status, nullptr);
    }
    requests_[Text(command, "handle")] = request;
    return "\"ok\":{\"request_id\":" + Quoted(request->id()) + "}";
  }

  std::string Read(const Struct& command) {
    const auto request = RequestOf(command);
    const auto* wanted = Find(command, "chunks");
    std::vector<v1::ResultEvent> events;
    bool end = false;
    while (!end && (wanted == nullptr || events.size() < wanted->number_value())) {
      if (auto event = request->Read()) {
        events.push_back(std::move(*event));
      } else {
        end = true;
      }
    }
    const std::string chunks = "\"chunks\":" + List(events, TellChunk);
    if (const auto status = end ? request->Wait() : google::rpc::Status(); status.code() != 0) {
      return "\"error\":" + TellError(status, request.get()) + "," + chunks;
    }
    return "\"ok\":{" + chunks + ",\"end\":" + (end ? "true" : "false") + "}";
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_;
  std::map<std::string, std::shared_ptr<Session>> sessions_;
  std::map<std::string, std::string> clients_;
  std::map<std::string, std::shared_ptr<Request>> requests_;
  std::vector<std::thread> waiting_;
};

}  // namespace

int main() {
  Driver driver;
  Driver::Tell("{\"ready\":{\"language\":\"cpp\",\"protocol\":1}}");
  for (std::string line; std::getline(std::cin, line);) driver.Take(line);
  driver.End();
  return 0;
}
