#include "comm/collectives.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "comm/exchange.h"
#include "comm/rank_mean.h"
#include "comm/tensor_part.h"

namespace tessera::comm {
namespace {

using Path = Group::Path;

// Large parts travel as messages of this size, so that one is added, and its mean sent on, while
// the next is on its way and what was received is still in the cache.
constexpr int64_t kMessageElements = 1 << 20;
// The parts of [0, elements) that travel as one message each.
std::vector<base::Interval> messages_of(int64_t elements) {
  std::vector<base::Interval> messages;
  for (int64_t begin = 0; begin < elements; begin += kMessageElements) {
    messages.push_back({begin, std::min(begin + kMessageElements, elements)});
  }
  return messages;
}

// Sends each peer its slot of this rank's values and receives theirs of this rank's slot. Each
// message's mean goes to `out` as soon as it can be taken, and the message then to `done`.
template <typename Slot, typename Done>
void scatter_mean(Exchange& exchange, const Group& group, Slot slot, const at::Tensor& out,
                  const at::Tensor& scratch, Done done) {
  const at::Tensor mine = slot(group.rank());
  const std::vector<base::Interval> messages = messages_of(mine.numel());
  const auto from = [&](int distance, base::Interval message) {
    return part(scratch, base::shift(message, (distance - 1) * mine.numel()));
  };
  for (size_t m = 0; m < messages.size(); ++m) {
    for (int d = 1; d < group.size(); ++d) {
      exchange.receive(from(d, messages[m]), peer_from(group, d), static_cast<int64_t>(m));
    }
  }
  for (int d = 1; d < group.size(); ++d) {
    const at::Tensor theirs = slot(peer_to(group, d));
    const std::vector<base::Interval> their_messages = messages_of(theirs.numel());
    for (size_t m = 0; m < their_messages.size(); ++m) {
      exchange.send(part(theirs, their_messages[m]), peer_to(group, d), static_cast<int64_t>(m));
    }
  }
  std::vector<at::Tensor> parts(group.size());
  for (size_t m = 0; m < messages.size(); ++m) {
    exchange.wait_received(group.size() - 1);
    parts[group.rank()] = part(mine, messages[m]);
    for (int d = 1; d < group.size(); ++d) parts[peer_from(group, d)] = from(d, messages[m]);
    mean_in_rank_order(part(out, messages[m]), parts);
    done(messages[m], static_cast<int64_t>(m));
  }
}

// Runs a native collective and waits for it by the backend's rules (host on CPU, stream on CUDA).
template <typename Start>
void run_native(Group& group, const std::string& what, Start start) {
  try {
    start()->wait(group.timeout());
  } catch (const std::exception& e) {
    throw_comm_error(group, what, -1, e);
  }
}

}  // namespace

void all_gather_in_place(Group& group, const at::Tensor& flat, const std::string& what) {
  const int64_t size = flat.numel() / group.size();
  const auto slot = [&](int rank) { return flat.narrow(0, rank * size, size); };
  if (group.path() == Path::kNone) return;
  if (group.path() == Path::kDirect) {
    Exchange exchange(group, what);
    for (int d = 1; d < group.size(); ++d)
      exchange.receive(slot(peer_from(group, d)), peer_from(group, d));
    for (int d = 1; d < group.size(); ++d) exchange.send(slot(group.rank()), peer_to(group, d));
    exchange.wait_all();
    return;
  }
  at::Tensor output = flat;
  at::Tensor input = slot(group.rank());
  run_native(group, what, [&] { return group.backend()._allgather_base(output, input); });
}

void reduce_scatter_mean(Group& group, const at::Tensor& full, const at::Tensor& out,
                         const at::Tensor& scratch, const std::string& what) {
  const int64_t size = out.numel();
  const auto slot = [&](int rank) { return full.narrow(0, rank * size, size); };
  if (group.path() == Path::kNone) {
    at::Tensor target = out;
    target.copy_(full);
    return;
  }
  if (group.path() == Path::kDirect) {
    Exchange exchange(group, what, static_cast<int64_t>(messages_of(size).size()));
    scatter_mean(exchange, group, slot, out, scratch, [](base::Interval, int64_t) {});
    exchange.wait_all();
    return;
  }
  at::Tensor output = out;
  at::Tensor input = full;
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  TESSERA_CHECK(out.scalar_type() == full.scalar_type(), "native reduce-scatter of ", full.dtype(),
                " into ", out.dtype(), ".");
  run_native(group, what,
             [&] { return group.backend()._reduce_scatter_base(output, input, options); });
}

int64_t reduce_scatter_scratch_parts(const Group& group) {
  return group.path() == Path::kDirect ? group.size() - 1 : 0;
}

void all_reduce_mean(Group& group, const at::Tensor& flat, const at::Tensor& scratch,
                     const std::string& what) {
  if (group.path() == Path::kNone) return;
  if (group.path() == Path::kNative) {
    std::vector<at::Tensor> list{flat};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    run_native(group, what, [&] { return group.backend().allreduce(list, options); });
    return;
  }
  if (flat.numel() == 0) return;  // `scratch` may be undefined.
  // A reduce-scatter of parts that differ by at most one element, and an all-gather of the means.
  const auto slot = [&](int rank) {
    return part(flat, base::even_part(flat.numel(), group.size(), rank));
  };
  const auto most =
      static_cast<int64_t>(messages_of(base::ceil_div(flat.numel(), group.size())).size());
  Exchange scatter(group, what, most);
  Exchange gather(group, what, most);
  const at::Tensor mine = slot(group.rank());
  scatter_mean(scatter, group, slot, mine, scratch, [&](base::Interval message, int64_t m) {
    for (int d = 1; d < group.size(); ++d) gather.send(part(mine, message), peer_to(group, d), m);
  });
  // A peer's means go where this rank's values for it were: those must have left.
  scatter.wait_all();
  for (int d = 1; d < group.size(); ++d) {
    const at::Tensor theirs = slot(peer_from(group, d));
    const std::vector<base::Interval> messages = messages_of(theirs.numel());
    for (size_t m = 0; m < messages.size(); ++m) {
      gather.receive(part(theirs, messages[m]), peer_from(group, d), static_cast<int64_t>(m));
    }
  }
  gather.wait_all();
}

int64_t all_reduce_scratch_elements(const Group& group, int64_t elements) {
  if (group.path() != Path::kDirect) return 0;
  return base::ceil_div(elements, group.size()) * (group.size() - 1);
}

void broadcast(Group& group, const at::Tensor& flat, const std::string& what) {
  if (group.path() == Path::kNone || flat.numel() == 0) return;
  std::vector<at::Tensor> list{flat};
  run_native(group, what, [&] { return group.backend().broadcast(list); });
}

}  // namespace tessera::comm
