// Goal: hooks run around forward whichever way LibTorch's containers reach it, and see every tensor
// of the result. Method: a hook that counts, hung on modules with all kinds of forward.

#include "engine/module_hook.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <stdexcept>
#include <string>

#include "base/error.h"
#include "tests/base/thrown.h"

namespace tessera {

struct TwoLosses {
  at::Tensor main, auxiliary;
  std::string note;
};

template <>
struct ForwardResult<TwoLosses> {
  template <typename Visit>
  static void visit(TwoLosses& result, Visit f) {
    f(result.main);
    f(result.auxiliary);
  }
};

namespace engine {

struct Counter : ForwardHook {
  void before_forward() override { log += "<"; }
  at::Tensor input(const at::Tensor& argument) override {
    log += "i";
    return cast ? argument.to(at::kDouble) : argument;
  }
  void after_forward(const std::vector<at::Tensor>& result) override {
    log += ">";
    outputs = result;
  }
  void check_whole(const char*) const override {}
  void forward_failed() noexcept override { log += "!"; }

  std::string log;
  bool cast = false;
  std::vector<at::Tensor> outputs;
};

struct DoublesImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x * 2; }
};
TESSERA_MODULE(Doubles);

struct ConstImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) const { return x + 1; }
};
TESSERA_MODULE(Const);

struct TwoArgumentsImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x, const at::Tensor& y) {
    return {x + y, x - y};
  }
};
TESSERA_MODULE(TwoArguments);

struct DefaultsImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x, double factor = 3.0, std::optional<at::Tensor> bias = {}) {
    return bias ? x * factor + *bias : x * factor;
  }
};
TESSERA_MODULE(Defaults);

struct ListsImpl : torch::nn::Module {
  std::vector<at::Tensor> forward(int64_t count, at::Tensor x) {
    return std::vector<at::Tensor>(count, x);
  }
};
TESSERA_MODULE(Lists);

struct MaybeImpl : torch::nn::Module {
  std::optional<std::pair<at::Tensor, int64_t>> forward(at::Tensor x, bool give) {
    if (!give) return std::nullopt;
    return std::make_pair(x, int64_t{5});
  }
};
TESSERA_MODULE(Maybe);

struct CustomImpl : torch::nn::Module {
  TwoLosses forward(at::Tensor x) { return {x, x + 1, "note"}; }
};
TESSERA_MODULE(Custom);

struct ThrowsImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor) { throw std::runtime_error("inside"); }
};
TESSERA_MODULE(Throws);

struct NothingImpl : torch::nn::Module {
  int64_t forward() { return 7; }
};
TESSERA_MODULE(Nothing);

struct CopyableImpl : torch::nn::Cloneable<CopyableImpl> {
  explicit CopyableImpl(int64_t width_) : width(width_) { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(width, width)); }
  at::Tensor forward(at::Tensor x) { return linear(x); }
  int64_t width;
  torch::nn::Linear linear{nullptr};
};
TESSERA_MODULE(Copyable);

struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
  ParentImpl() { reset(); }
  void reset() override { child = register_module("child", Copyable(2)); }
  at::Tensor forward(at::Tensor x) { return child(x); }
  Copyable child{nullptr};
};
TESSERA_MODULE(Parent);

// The hook on `module` while `call` runs.
template <typename Holder, typename Call>
Counter hooked(Holder& module, const Call& call) {
  Counter counter;
  module->set_forward_hook(&counter);
  call();
  module->set_forward_hook(nullptr);
  return counter;
}

const at::Tensor kX = at::arange(4, at::kFloat);

TEST(ModuleHookTest, RunsInEveryWayToCallAForward) {
  Doubles module;
  EXPECT_EQ(hooked(module, [&] { module(kX); }).log, "<i>");
  EXPECT_EQ(hooked(module, [&] { module->forward(kX); }).log, "<i>");

  torch::nn::Sequential sequential(module, Doubles(), module);
  EXPECT_EQ(hooked(module, [&] { sequential->forward(kX); }).log, "<i><i>") << "it is there twice";

  torch::nn::AnyModule any(module);
  EXPECT_EQ(hooked(module, [&] { any.forward(kX); }).log, "<i>");

  torch::nn::ModuleList list(module);
  EXPECT_EQ(hooked(module, [&] { list[0]->as<Doubles>()->forward(kX); }).log, "<i>");
  EXPECT_EQ(hooked(module, [&] { list->at<Doubles::Impl>(0).forward(kX); }).log, "<i>");

  using Named = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;
  torch::nn::ModuleDict dict(Named{{"name", module.ptr()}});
  EXPECT_EQ(hooked(module, [&] { dict["name"]->as<Doubles>()->forward(kX); }).log, "<i>");

  Doubles copy_of_holder = module;
  EXPECT_EQ(hooked(module, [&] { copy_of_holder->forward(kX); }).log, "<i>");
}

TEST(ModuleHookTest, ACallWithoutAHookIsTheForwardAlone) {
  Doubles module;
  EXPECT_TRUE(at::equal(module(kX), kX * 2));
  EXPECT_TRUE(at::equal(std::get<0>(TwoArguments()(kX, kX)), kX * 2));
  EXPECT_EQ(module->forward_hook(), nullptr);
}

TEST(ModuleHookTest, AConstForwardAndSeveralArgumentsAreHooked) {
  Const constant;
  at::Tensor result;
  EXPECT_EQ(hooked(constant, [&] { result = constant(kX); }).log, "<i>");
  EXPECT_TRUE(at::equal(result, kX + 1));
  TwoArguments two;
  const Counter counter = hooked(two, [&] { two(kX, kX * 3); });
  EXPECT_EQ(counter.log, "<ii>");
  ASSERT_EQ(counter.outputs.size(), 2u);
  EXPECT_TRUE(at::equal(counter.outputs[0], kX * 4));
  EXPECT_TRUE(at::equal(counter.outputs[1], kX * -2));
}

TEST(ModuleHookTest, DefaultArgumentsMayBeGivenOrNot) {
  Defaults module;
  at::Tensor result;
  EXPECT_EQ(hooked(module, [&] { result = module(kX); }).log, "<i>");
  EXPECT_TRUE(at::equal(result, kX * 3));
  hooked(module, [&] { result = module->forward(kX, 2.0); });
  EXPECT_TRUE(at::equal(result, kX * 2));
  EXPECT_EQ(hooked(module, [&] { result = module(kX, 2.0, kX); }).log.front(), '<');
  EXPECT_TRUE(at::equal(result, kX * 3));
  EXPECT_TRUE(at::equal(module(kX), kX * 3)) << "without a hook";
}

TEST(ModuleHookTest, FindsTheTensorsOfEveryKindOfResult) {
  Lists lists;
  EXPECT_EQ(hooked(lists, [&] { lists(3, kX); }).outputs.size(), 3u);
  EXPECT_EQ(hooked(lists, [&] { lists(0, kX); }).outputs.size(), 0u);
  Maybe maybe;
  EXPECT_EQ(hooked(maybe, [&] { maybe(kX, true); }).outputs.size(), 1u);
  EXPECT_EQ(hooked(maybe, [&] { maybe(kX, false); }).outputs.size(), 0u);
  Nothing nothing;
  const Counter counter = hooked(nothing, [&] { EXPECT_EQ(nothing(), 7); });
  EXPECT_EQ(counter.log, "<>");
  EXPECT_TRUE(counter.outputs.empty());
}

TEST(ModuleHookTest, AStructOfTheUsersIsVisitedThroughItsSpecialisation) {
  Custom module;
  const Counter counter = hooked(module, [&] { EXPECT_EQ(module(kX).note, "note"); });
  ASSERT_EQ(counter.outputs.size(), 2u);
  EXPECT_TRUE(at::equal(counter.outputs[1], kX + 1));
}

TEST(ModuleHookTest, TheHookMayReplaceTensorArguments) {
  TwoArguments module;
  Counter counter;
  counter.cast = true;
  module->set_forward_hook(&counter);
  const auto result = module(kX, kX);
  module->set_forward_hook(nullptr);
  EXPECT_EQ(std::get<0>(result).scalar_type(), at::kDouble);
  EXPECT_EQ(kX.scalar_type(), at::kFloat);
}

TEST(ModuleHookTest, AForwardThatThrowsIsToldAsFailed) {
  Throws module;
  const Counter counter =
      hooked(module, [&] { EXPECT_EQ(thrown<std::runtime_error>([&] { module(kX); }), "inside"); });
  EXPECT_EQ(counter.log, "<i!");
}

TEST(ModuleHookTest, AHookPointIsFoundFromThePlainModule) {
  Doubles module;
  const std::shared_ptr<torch::nn::Module> plain = module.ptr();
  EXPECT_NE(dynamic_cast<HookPoint*>(plain.get()), nullptr);
  const auto missed = std::make_shared<DoublesImpl>();
  EXPECT_EQ(dynamic_cast<HookPoint*>(static_cast<torch::nn::Module*>(missed.get())), nullptr);
}

TEST(ModuleHookTest, ACloneIsHookableAndHasParametersOfItsOwn) {
  Parent original;
  const auto copy = std::dynamic_pointer_cast<Parent::Impl>(original->clone());
  ASSERT_NE(copy, nullptr) << "the hooked type";
  ASSERT_NE(dynamic_cast<HookPoint*>(copy->child.get()), nullptr);
  EXPECT_EQ(copy->child->width, 2);
  const auto a = original->named_parameters();
  const auto b = copy->named_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (const auto& param : a) {
    EXPECT_TRUE(at::equal(param.value(), b[param.key()]));
    EXPECT_NE(param.value().data_ptr(), b[param.key()].data_ptr());
  }
  // The clone computes with its own parameters, and a hook on it sees its forward alone.
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : copy->parameters()) param.zero_();
  }
  const at::Tensor x = at::ones({1, 2});
  Counter counter;
  copy->child->set_forward_hook(&counter);
  EXPECT_TRUE(at::equal(copy->forward(x), at::zeros({1, 2})));
  EXPECT_EQ(counter.log, "<i>");
  EXPECT_FALSE(at::equal(original(x), at::zeros({1, 2})));
  EXPECT_EQ(counter.log, "<i>");
  copy->child->set_forward_hook(nullptr);
}

TEST(ModuleHookTest, ACloneOfAHookedModuleIsRefused) {
  Copyable module(2);
  hooked(module, [&] {
    const std::string text = thrown<ConfigError>([&] { module->clone(); });
    EXPECT_TRUE(contains(text, "Clone the model before parallelize()")) << text;
  });
  EXPECT_NO_THROW(module->clone());
}

// What cannot be wrapped does not compile, with a message of ours; here the conditions behind it.
struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor forward(at::Tensor x, at::Tensor y) { return x + y; }
};
struct TemplateImpl : torch::nn::Module {
  template <typename T>
  T forward(T x) {
    return x;
  }
};
struct MissingImpl : torch::nn::Module {};
static_assert(!detail::HasOneForward<OverloadedImpl>::value);
static_assert(!detail::HasOneForward<TemplateImpl>::value);
static_assert(!detail::HasOneForward<MissingImpl>::value);
static_assert(detail::HasOneForward<ConstImpl>::value);
static_assert(detail::HasOneForward<DefaultsImpl>::value);

}  // namespace engine
}  // namespace tessera
