#include "launch/free_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace tessera::launch {
namespace {

class Socket {
 public:
  explicit Socket(int family) : fd_(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Bound {
  int error = 0;  // errno of socket() or bind(); 0 when bound
  int64_t port = 0;
};

// Binds all addresses, as LibTorch's TCPStore does: a listener on only one of them conflicts as
// well.
Bound bind_everywhere(int family, int64_t port) {
  Socket socket(family);
  if (socket.fd() < 0) return {errno, 0};
  // Connections of an earlier run that linger in TIME_WAIT do not keep the store from listening, so
  // they must not count here.
  const int on = 1;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));

  sockaddr_storage address;
  std::memset(&address, 0, sizeof(address));
  socklen_t length = 0;
  if (family == AF_INET6) {
    const int off = 0;
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address);
    v6->sin6_family = AF_INET6;
    v6->sin6_addr = in6addr_any;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    length = sizeof(*v6);
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(INADDR_ANY);
    v4->sin_port = htons(static_cast<uint16_t>(port));
    length = sizeof(*v4);
  }
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket.fd(), plain, length) != 0) return {errno, 0};
  // bind() lets two sockets share a port as long as none listens; listening is the real question.
  if (::listen(socket.fd(), 1) != 0) return {errno, 0};
  if (::getsockname(socket.fd(), plain, &length) != 0) return {errno, 0};
  const uint16_t bound = family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                            : reinterpret_cast<sockaddr_in*>(&address)->sin_port;
  return {0, ntohs(bound)};
}

// Both families at once where the machine has IPv6, else IPv4 alone.
Bound bind_here(int64_t port) {
  const Bound v6 = bind_everywhere(AF_INET6, port);
  const bool no_v6 = v6.error == EAFNOSUPPORT || v6.error == EADDRNOTAVAIL;
  return no_v6 ? bind_everywhere(AF_INET, port) : v6;
}

}  // namespace

int64_t pick_free_port() {
  const Bound bound = bind_here(0);
  TESSERA_CHECK_CONFIG(bound.error == 0,
                       "cannot find a free TCP port on this machine: ", std::strerror(bound.error));
  return bound.port;
}

bool port_is_free(int64_t port) {
  const Bound bound = bind_here(port);
  if (bound.error == EADDRINUSE) return false;
  TESSERA_CHECK_CONFIG(bound.error == 0, "cannot listen on TCP port ", port, ": ",
                       std::strerror(bound.error),
                       ". Choose another port, or 0 to have a free one picked.");
  return true;
}

}  // namespace tessera::launch
