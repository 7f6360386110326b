#include "comm/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

namespace tessera::comm {

Group::Group(std::string name) : name_(std::move(name)), stream_(name_, Stream::Kind::kInline) {}

Group::Group(std::string name, c10::intrusive_ptr<c10d::Backend> backend, Path path,
             std::chrono::milliseconds timeout)
    : name_(std::move(name)),
      backend_(std::move(backend)),
      path_(path),
      timeout_(timeout),
      stream_(name_, path == Path::kDirect ? Stream::Kind::kWorker : Stream::Kind::kInline) {
  rank_ = backend_->getRank();
  size_ = backend_->getSize();
}

Group::~Group() = default;

int Group::next_tags(int64_t count) {
  // Exchanges a million messages apart are never under way together.
  constexpr int64_t kEnd = int64_t{1} << kTagBits;
  if (next_tag_ + count > kEnd) next_tag_ = 0;
  const auto first = static_cast<int>(next_tag_);
  next_tag_ += count;
  return first;
}

}  // namespace tessera::comm
