// Sends each argument after the target as a prompt, all on one session, and prints the texts.
//
//   session 127.0.0.1:50051 "Once upon a time" "The river"
#include <iostream>

#include "headrace/session.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: session TARGET PROMPT...\n";
    return 2;
  }
  headrace::example::Session session(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  std::vector<std::shared_ptr<headrace::example::Request>> requests;
  for (int i = 2; i < argc; ++i) {
    headrace::v1::GenerationSpec spec;
    spec.set_request_id("prompt-" + std::to_string(i - 1));
    spec.mutable_text()->set_text(argv[i]);
    spec.mutable_stop()->set_max_tokens(32);
    requests.push_back(session.Submit(std::move(spec)));
  }
  int code = 0;
  for (const auto& request : requests) {
    if (request == nullptr) return 1;
    std::cout << request->id() << ":";
    while (const auto event = request->Read()) std::cout << event->delta().text() << std::flush;
    std::cout << "\n";
    if (const auto status = request->Wait(); status.code() != 0) {
      std::cerr << request->id() << ": " << status.message() << "\n";
      code = 1;
    }
  }
  session.Close();
  return code;
}
