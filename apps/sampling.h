#ifndef APPS_SAMPLING_H_
#define APPS_SAMPLING_H_

// Text from a model of bytes, to look at what a training has learned.
//
// Every byte costs one forward over the last max_seq_len tokens. There is no cache of keys and
// values: a few hundred bytes of a model that is being trained are wanted now and then, not a
// service, and so the model needs no second forward whose results would have to be kept equal to
// those of the first.

#include <cstdint>
#include <string>

#include "apps/llama.h"

namespace tessera::apps {

struct SampleOptions {
  int64_t num_bytes = 200;
  double temperature = 1.0;  // 0: always the likeliest byte
  int64_t top_k = 0;         // draw among the k likeliest bytes; 0: among all
  uint64_t seed = 0;
};

// The bytes that the model writes after the prompt (without the prompt). Tokens are bytes: the
// prompt's are tokens 0 to 255, and of a larger vocabulary only those are drawn. The same options
// give the same text. No gradients; the default generator is left alone.
//
// Collective: in the sharded modes, as every forward gathers: all ranks call it, with the same
//             arguments.
// Errors:     ConfigError for an empty prompt, a vocabulary of fewer than 256 tokens, or options
//             out of range.
std::string sample(Llama model, const std::string& prompt, const SampleOptions& options = {});

// The text with every byte that a terminal does not show as one ASCII character written as \n, \t,
// \r, \\ or \xHH.
std::string escape(const std::string& text);

}  // namespace tessera::apps

#endif  // APPS_SAMPLING_H_
