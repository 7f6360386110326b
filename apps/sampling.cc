#include "apps/sampling.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"

namespace tessera::apps {
namespace {

constexpr int64_t kNumBytes = 256;

void check_call(const Llama& model, const std::string& prompt, const SampleOptions& options) {
  const int64_t vocab_size = model->config().vocab_size;
  TESSERA_CHECK_CONFIG(vocab_size >= kNumBytes, "sample: expected a model of bytes, with at least ",
                       kNumBytes, " tokens; found vocab_size ", vocab_size, ".");
  TESSERA_CHECK_CONFIG(!prompt.empty(),
                       "sample: expected a prompt of at least one byte, found an empty one. "
                       "A line feed will do.");
  TESSERA_CHECK_CONFIG(options.num_bytes >= 0, "sample: expected num_bytes >= 0, found ",
                       options.num_bytes, ".");
  TESSERA_CHECK_CONFIG(std::isfinite(options.temperature) && options.temperature >= 0,
                       "sample: expected a finite temperature >= 0, found ", options.temperature,
                       ".");
  TESSERA_CHECK_CONFIG(options.top_k >= 0, "sample: expected top_k >= 0, found ", options.top_k,
                       ".");
}

// Shapes: logits [256], fp32, on the CPU.
int64_t draw(at::Tensor logits, const SampleOptions& options, const at::Generator& generator) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  if (options.top_k == 0) {
    return at::multinomial(at::softmax(logits / options.temperature, 0), 1, false, generator)
        .item<int64_t>();
  }
  const auto [values, bytes] = logits.topk(std::min(options.top_k, kNumBytes));
  const at::Tensor picked =
      at::multinomial(at::softmax(values / options.temperature, 0), 1, false, generator);
  return bytes[picked.item<int64_t>()].item<int64_t>();
}

}  // namespace

std::string sample(Llama model, const std::string& prompt, const SampleOptions& options) {
  check_call(model, prompt, options);
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const at::Device device = model->parameters().front().device();
  const auto window = static_cast<size_t>(model->config().max_seq_len);

  std::vector<int64_t> tokens;
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  std::string text;
  for (int64_t i = 0; i < options.num_bytes; ++i) {
    const size_t seen = std::min(window, tokens.size());
    const at::Tensor context =
        at::from_blob(tokens.data() + (tokens.size() - seen), {1, static_cast<int64_t>(seen)},
                      at::TensorOptions(at::kLong))
            .to(device);
    const at::Tensor logits = model(context)[0][-1].to(at::kCPU, at::kFloat);
    tokens.push_back(draw(logits.narrow(0, 0, kNumBytes), options, generator));
    text.push_back(static_cast<char>(static_cast<unsigned char>(tokens.back())));
  }
  return text;
}

std::string escape(const std::string& text) {
  static const char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\\':
        out += "\\\\";
        break;
      default:
        if (byte >= 0x20 && byte < 0x7f) {
          out += c;
        } else {
          out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
        }
    }
  }
  return out;
}

}  // namespace tessera::apps
