#include "headrace/session.h"

#include <utility>

namespace headrace::example {

namespace {

google::rpc::Status MakeStatus(int code, const std::string& message) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  return status;
}

// Whether a call that ended like this, without details of a server's own, was lost, whatever gRPC calls that.
bool IsLoss(const grpc::Status& end) {
  switch (end.error_code()) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return true;
    default:  // some of RST_STREAM's codes have one of gRPC's own
      return end.error_message().find("RST_STREAM") != std::string::npos;
  }
}

}  // namespace

void Shared::Send(v1::StreamResultRequest command) {
  command.set_command_id(++commands);
  outgoing.push_back(std::move(command));
  changed.notify_all();
}

std::optional<v1::ResultEvent> Request::Read() {
  std::unique_lock lock(shared_->mutex);
  for (;;) {
    while (read_ < events_.size()) {
      const auto& event = events_[read_++];
      if (event.has_delta()) return event;
    }
    if (done_) return std::nullopt;
    shared_->changed.wait(lock);
  }
}

google::rpc::Status Request::Wait() {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [this] { return done_; });
  return status_;
}

std::vector<v1::ResultEvent> Request::events() const {
  std::lock_guard lock(shared_->mutex);
  return events_;
}

void Request::Cancel() {
  std::lock_guard lock(shared_->mutex);
  if (done_) return;
  v1::StreamResultRequest command;
  command.mutable_cancel()->set_request_id(id_);
  shared_->Send(std::move(command));
}

Session::Session(const std::shared_ptr<grpc::Channel>& channel)
    : stub_(v1::GenerationService::NewStub(channel)), call_(stub_->StreamResult(&context_)) {
  reader_ = std::thread([this] { ReadAll(); });
  sender_ = std::thread([this] { SendAll(); });
}

Session::~Session() {
  Abort();
  reader_.join();
  sender_.join();
}

std::shared_ptr<Request> Session::Submit(v1::GenerationSpec spec, std::vector<std::string> capabilities) {
  std::lock_guard lock(shared_->mutex);
  if (closing_ || ended_ || live_.count(spec.request_id())) return nullptr;
  const uint32_t choices = spec.has_n() ? spec.n() : 1;
  std::shared_ptr<Request> request(new Request(shared_, spec.request_id(), choices));
  live_[request->id()] = request;
  v1::StreamResultRequest command;
  for (auto& name : capabilities) command.add_required_capabilities(std::move(name));
  *command.mutable_add()->mutable_spec() = std::move(spec);
  asked_[shared_->commands + 1] = request;
  shared_->Send(std::move(command));
  return request;
}

void Session::Close() {
  std::unique_lock lock(shared_->mutex);
  closing_ = true;
  shared_->changed.notify_all();
  shared_->changed.wait(lock, [this] { return ended_; });
}

void Session::Abort() { context_.TryCancel(); }

void Session::SendAll() {
  std::unique_lock lock(shared_->mutex);
  for (;;) {
    shared_->changed.wait(lock, [this] { return ended_ || !shared_->outgoing.empty() || (closing_ && live_.empty()); });
    if (ended_) return;
    if (shared_->outgoing.empty()) break;
    const v1::StreamResultRequest command = std::move(shared_->outgoing.front());
    shared_->outgoing.pop_front();
    lock.unlock();
    const bool sent = call_->Write(command);
    lock.lock();
    if (!sent) return;  // the call has ended; the reader says why
  }
  lock.unlock();
  call_->WritesDone();
}

void Session::ReadAll() {
  v1::StreamResultResponse response;
  while (call_->Read(&response)) {
    std::lock_guard lock(shared_->mutex);
    Take(response);
    shared_->changed.notify_all();
  }
  const grpc::Status end = call_->Finish();
  std::lock_guard lock(shared_->mutex);
  google::rpc::Status status;
  if (end.ok() || end.error_code() == grpc::StatusCode::CANCELLED ||
      !status.ParseFromString(end.error_details()) || status.code() != end.error_code()) {
    status = MakeStatus(IsLoss(end) ? grpc::StatusCode::UNAVAILABLE : end.error_code(),
                        "the session ended: " + end.error_message());
  }
  while (!live_.empty()) End(live_.begin()->second, status);
  ended_ = true;
  shared_->changed.notify_all();
}

void Session::Take(const v1::StreamResultResponse& response) {
  for (const auto& rejection : response.rejections()) {
    const auto found = asked_.find(rejection.command_id());
    if (found == asked_.end()) continue;  // of a cancel whose request has just ended
    End(found->second, rejection.status());
    asked_.erase(rejection.command_id());
  }
  for (const auto& detached : response.detached()) {
    const auto found = numbered_.find(detached.request_number());
    if (found != numbered_.end()) End(found->second, MakeStatus(grpc::StatusCode::ABORTED, "another stream has it"));
  }
  for (const auto& event : response.events()) Add(event);
}

void Session::Add(const v1::ResultEvent& event) {
  if (event.has_accepted()) {
    asked_.erase(event.accepted().command_id());
    const auto live = live_.find(event.accepted().request_id());
    if (live != live_.end()) {
      live->second->number_ = event.request_number();
      numbered_[event.request_number()] = live->second;
    }
  }
  const auto found = numbered_.find(event.request_number());
  if (found == numbered_.end()) return;  // of a request that has failed here
  const auto request = found->second;
  if (event.seq() != request->events_.size() + 1) {
    End(request, MakeStatus(grpc::StatusCode::DATA_LOSS, "an event is missing, or came twice"));
    v1::StreamResultRequest command;
    command.mutable_cancel()->set_request_id(request->id());
    shared_->Send(std::move(command));
    return;
  }
  request->events_.push_back(event);  // one of a newer kind, too: its number counts
  if (event.has_failed()) {
    End(request, event.failed().status());
  } else if (event.has_finished() && --request->left_ == 0) {
    End(request, google::rpc::Status());
  }
}

void Session::End(const std::shared_ptr<Request>& request, google::rpc::Status status) {
  request->done_ = true;
  request->status_ = std::move(status);
  numbered_.erase(request->number_);
  const std::string id = request->id();
  live_.erase(id);
}

}  // namespace headrace::example
