#ifndef COMM_GLOO_H_
#define COMM_GLOO_H_

// Makes Gloo groups. The only file that includes Gloo's headers, which the wheel of LibTorch does
// not have.

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

// Connects every rank with every other. Uses the interface named by GLOO_SOCKET_IFNAME, else that
// of the host's name.
//
// Collective: yes; the ranks meet in `store`, under keys of their own (prefix it per group).
// Errors:     what c10d throws when a peer does not arrive within `timeout`.
c10::intrusive_ptr<c10d::Backend> make_gloo(c10::intrusive_ptr<c10d::Store> store, int rank,
                                            int size, std::chrono::milliseconds timeout);

}  // namespace tessera::comm

#endif  // COMM_GLOO_H_
