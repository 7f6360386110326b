#ifndef COMM_AGREEMENT_H_
#define COMM_AGREEMENT_H_

// Small agreements of all ranks, over the host group. A rank that finds a fault must not throw
// alone before a collective, or the others hang: it brings its fault here, and all ranks throw.
//
// Collective: every function here; all ranks, in the same order.
// Cost:       one message from every rank to every other; the memory of all ranks' contributions.
// Errors:     CommError that names the peer when one is gone or late.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/world.h"

namespace tessera::comm {

// Runs `work` on every rank, then compares: when it threw anywhere, every rank throws. The rank
// that failed throws its own exception again; the others a ConfigError with the first failing
// rank's message.
//
// Requires: `work` calls no collective that a rank which threw before it would miss.
void all_or_none(const World& world, const std::function<void()>& work);

// Errors: ConfigError on all ranks, naming the first rank whose `value` differs from rank 0's and
//         the first line in which it does, when not all ranks bring the same text.
void check_same(const World& world, const std::string& what, const std::string& value);

// The sum over ranks, added in rank order: the same bits on every rank.
double sum_over_ranks(const World& world, double value);
std::vector<double> sum_over_ranks(const World& world, const std::vector<double>& values);

// flags[i] = 1 where it is on any rank.
void any_over_ranks(const World& world, std::vector<uint8_t>& flags);

// Every rank's text, by rank.
std::vector<std::string> texts_of_ranks(const World& world, const std::string& text);

}  // namespace tessera::comm

#endif  // COMM_AGREEMENT_H_
