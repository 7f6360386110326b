#ifndef COMM_COLLECTIVES_H_
#define COMM_COLLECTIVES_H_

// The three collectives of training, on flat buffers, and the broadcast that begins it.
//
// [Note: direct exchange] On Gloo an all-gather, reduce-scatter or all-reduce sends each other rank
// its part straight from the flat buffer and receives in place, or into scratch what is to be
// added: no staging copy. Parts to be added travel in messages of at most 2^20 elements. Broadcast
// is Gloo's own. Sums are ours, in rank order ((g0 + g1) + g2 ...) in the dtype of the output (half
// types: in fp32), then divided by W: the same bits for every strategy, bucket size and overlap,
// and the same as one process that adds the ranks' gradients in order. Other backends use their own
// collectives, with AVG.
//
// `what` names the collective in errors ("gather of unit 'layers.3'").
//
// Collective: every function here; all ranks of the group, in the same order, with equal shapes.
// Stream:     to be called inside a closure given to comm::Stream; returns when the result is there
//             (CPU) or enqueued.
// Errors:     CommError that names the rank, `what` and the peer that failed, when a peer is gone
//             or later than the group's time limit. The group cannot be used after that.

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/group.h"

namespace tessera::comm {

// Fills `flat` from all ranks' parts, in place.
//
// Shapes: flat: [W * S]; on entry flat[rank * S, (rank + 1) * S) holds this rank's part.
void all_gather_in_place(Group& group, const at::Tensor& flat, const std::string& what);

// out = mean over ranks of this rank's part of their `full`.
//
// Shapes:  full: [W * S]; out: [S]; scratch: at least [(W - 1) * S] of full's dtype, or undefined
//          where reduce_scatter_scratch_parts() is 0.
// Ensures: full is not changed.
void reduce_scatter_mean(Group& group, const at::Tensor& full, const at::Tensor& out,
                         const at::Tensor& scratch, const std::string& what);

// How many parts of [S] reduce_scatter_mean needs as scratch.
int64_t reduce_scatter_scratch_parts(const Group& group);

// flat = mean over ranks of flat, in place.
//
// Shapes: flat: [N]; scratch: all_reduce_scratch_elements(group, N) of flat's dtype, or undefined
//         where that is 0.
void all_reduce_mean(Group& group, const at::Tensor& flat, const at::Tensor& scratch,
                     const std::string& what);
int64_t all_reduce_scratch_elements(const Group& group, int64_t elements);

// Every rank gets rank 0's contents.
void broadcast(Group& group, const at::Tensor& flat, const std::string& what);

}  // namespace tessera::comm

#endif  // COMM_COLLECTIVES_H_
