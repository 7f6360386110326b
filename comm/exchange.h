#ifndef COMM_EXCHANGE_H_
#define COMM_EXCHANGE_H_

// One round of messages between the ranks of a group, straight from and into the tensors given: how
// collectives and agreements travel on Path::kDirect. Every message has one peer, so an error can
// name it.
//
//   Exchange exchange(group, "all-gather of unit 'root'");
//   exchange.receive(...) for every peer, exchange.send(...) to every peer, exchange.wait_all()
//
// Between two ranks several messages can go, told apart by an index that both sides count alike.
// Post receives first where the memory is free, so that no sender waits for a buffer; an
// all-reduce's means cannot. Empty tensors are not sent: both sides know the sizes.
//
// Collective: yes; all ranks of the group make their exchanges in the same order.
// Errors:     CommError that names the rank, `what` and the peer, when a peer is gone or later than
//             the group's time limit. The group cannot be used after that.

#include <ATen/core/Tensor.h>

#include <exception>
#include <string>
#include <vector>

#include "comm/group.h"

namespace c10d {
class Work;
}

namespace tessera::comm {

class Exchange {
 public:
  // Requires: group.path() == kDirect; `what` outlives the exchange; no rank sends another one more
  //           than num_messages messages, a number that is the same on all ranks.
  Exchange(Group& group, const std::string& what, int64_t num_messages = 1);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The tensors are kept alive until the exchange goes.
  void receive(const at::Tensor& into, int peer, int64_t index = 0);
  void send(const at::Tensor& from, int peer, int64_t index = 0);
  // Returns when the next `count` receives, in the order in which they were posted, are there.
  void wait_received(int64_t count);
  // Returns when all messages have gone and come.
  void wait_all();

 private:
  struct Message {
    int peer;
    c10::intrusive_ptr<c10d::Work> work;  // null for a message without bytes
  };

  template <typename Start>
  void post(std::vector<Message>& messages, const at::Tensor& tensor, int peer, Start start);
  void wait(const Message& message);

  Group& group_;
  const std::string& what_;
  int tag_;
  std::vector<Message> receives_;
  std::vector<Message> sends_;
  size_t received_ = 0;
};

// Peers in an order in which at any time each rank receives from one rank only: distances 1 to
// W - 1.
int peer_to(const Group& group, int distance);
int peer_from(const Group& group, int distance);

// Throws the CommError of a message, or of a collective as a whole where peer is -1.
[[noreturn]] void throw_comm_error(const Group& group, const std::string& what, int peer,
                                   const std::exception& cause);

// What LibTorch's exception says, without the stack trace that c10::Error appends and without a
// full stop at the end.
std::string reason_of(const std::exception& cause);

}  // namespace tessera::comm

#endif  // COMM_EXCHANGE_H_
