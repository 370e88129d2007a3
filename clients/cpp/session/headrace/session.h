// An example of a session: many requests on one StreamResult call, each read by itself.
//
// One thread reads the call and gives each event to its request; another sends commands, so that no caller waits for
// the network. A request that is not read keeps its events here and holds up no other. There is no resume: when the
// call is lost, its requests fail with UNAVAILABLE and what had arrived. docs/clients.md says what a whole library does.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "google/rpc/status.pb.h"
#include "headrace/v1/generation_service.grpc.pb.h"

namespace headrace::example {

class Session;

// What a session and its requests share.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<v1::StreamResultRequest> outgoing;
  uint64_t commands = 0;

  // The mutex is held.
  void Send(v1::StreamResultRequest command);
};

// One request of a session. Its methods may be called from any thread; it may outlive its session.
class Request {
 public:
  const std::string& id() const { return id_; }
  // Waits for the next output, in the order in which it came; none: the request has ended.
  std::optional<v1::ResultEvent> Read();
  // Waits for the end. OK: it finished or was cancelled, and `events` has how; else why it failed.
  google::rpc::Status Wait();
  // All events so far.
  std::vector<v1::ResultEvent> events() const;
  // Asks the server to end it. Without effect after its end.
  void Cancel();

 private:
  friend class Session;
  Request(std::shared_ptr<Shared> shared, std::string id, uint32_t choices)
      : shared_(std::move(shared)), id_(std::move(id)), left_(choices) {}

  const std::shared_ptr<Shared> shared_;
  const std::string id_;
  uint32_t left_;  // choices that have not finished
  uint32_t number_ = 0;
  size_t read_ = 0;
  bool done_ = false;
  google::rpc::Status status_;
  std::vector<v1::ResultEvent> events_;
};

class Session {
 public:
  explicit Session(const std::shared_ptr<grpc::Channel>& channel);
  // Ends the call; requests that live are cancelled by the server.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Starts a request; `spec` needs an id that is not live here. None: the session takes no more.
  std::shared_ptr<Request> Submit(v1::GenerationSpec spec, std::vector<std::string> capabilities = {});
  // Accepts no more requests, and returns when the live ones have ended.
  void Close();
  // Ends the call at once.
  void Abort();

 private:
  void ReadAll();
  void SendAll();
  void Take(const v1::StreamResultResponse& response);
  void Add(const v1::ResultEvent& event);
  void End(const std::shared_ptr<Request>& request, google::rpc::Status status);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::map<std::string, std::shared_ptr<Request>> live_;
  std::map<uint32_t, std::shared_ptr<Request>> numbered_;
  std::map<uint64_t, std::shared_ptr<Request>> asked_;  // by the command that started it
  bool closing_ = false;
  bool ended_ = false;

  std::unique_ptr<v1::GenerationService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StreamResultRequest, v1::StreamResultResponse>> call_;
  std::thread reader_;
  std::thread sender_;
};

}  // namespace headrace::example
