// Exceptions of the native core. bindings.cpp translates each to the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace moe_comm {

struct HeapError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerDied : PeerError {
  using PeerError::PeerError;
};
struct PeerTimeout : PeerError {
  using PeerError::PeerError;
};

// The ranks' headers differ, or a header reports invalid input. Python compares the headers and formats the message.
struct HandshakeFailed : std::runtime_error {
  explicit HandshakeFailed(std::vector<std::string> all) : std::runtime_error("handshake"), headers(std::move(all)) {}
  std::vector<std::string> headers;
};

}  // namespace moe_comm
