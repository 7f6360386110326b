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

int Group::next_tag() {
  // Gloo takes tags below 2^31; two exchanges 2^30 apart are never under way together.
  next_tag_ = (next_tag_ + 1) & 0x3fffffff;
  return next_tag_;
}

}  // namespace tessera::comm
