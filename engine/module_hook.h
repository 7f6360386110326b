#ifndef ENGINE_MODULE_HOOK_H_
#define ENGINE_MODULE_HOOK_H_

// TESSERA_MODULE(Name) declares the holder of a module type as TORCH_MODULE does, and lets the
// engine run before and after its forward. LibTorch's modules have no hooks and a forward that is
// not virtual, so the holder contains Hooked<NameImpl>, which derives from NameImpl and has a
// forward of its own.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); };
//   TESSERA_MODULE(Block);
//
// The hooks run in block(x), block->forward(x), Sequential, AnyModule, ModuleList and ModuleDict's
// as<Block>(). They do not run in a call through a BlockImpl* or BlockImpl&, or when the module was
// made by make_shared<BlockImpl>. A forward with default arguments works through the holder, not in
// Sequential and AnyModule (whose own limits on default arguments it has). Overloaded or template
// forwards do not compile. Without a hook a call costs a null check.
//
// The tensors of a forward's result are found by ForwardResult<T>; specialise it for a result type
// of your own:
//
//   template <> struct tessera::ForwardResult<MyOutput> {
//     template <typename Visit> static void visit(MyOutput& r, Visit f) { f(r.logits); }
//   };

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera {

template <typename T, typename Enable = void>
struct ForwardResult {
  static_assert(sizeof(T) == 0,
                "TESSERA_MODULE: forward returns a type whose tensors are not known; specialise "
                "tessera::ForwardResult for it (see engine/module_hook.h)");
};

template <typename T>
struct ForwardResult<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
  template <typename Visit>
  static void visit(T&, Visit) {}
};

template <>
struct ForwardResult<at::Tensor> {
  template <typename Visit>
  static void visit(at::Tensor& result, Visit f) {
    f(result);
  }
};

template <typename T>
struct ForwardResult<std::optional<T>> {
  template <typename Visit>
  static void visit(std::optional<T>& result, Visit f) {
    if (result) ForwardResult<T>::visit(*result, f);
  }
};

template <typename T>
struct ForwardResult<std::vector<T>> {
  template <typename Visit>
  static void visit(std::vector<T>& result, Visit f) {
    for (T& element : result) ForwardResult<T>::visit(element, f);
  }
};

template <typename A, typename B>
struct ForwardResult<std::pair<A, B>> {
  template <typename Visit>
  static void visit(std::pair<A, B>& result, Visit f) {
    ForwardResult<A>::visit(result.first, f);
    ForwardResult<B>::visit(result.second, f);
  }
};

template <typename... T>
struct ForwardResult<std::tuple<T...>> {
  template <typename Visit>
  static void visit(std::tuple<T...>& result, Visit f) {
    std::apply([&](T&... element) { (ForwardResult<T>::visit(element, f), ...); }, result);
  }
};

namespace engine {

// What the engine does around a forward. See engine/schedule.h.
class ForwardHook {
 public:
  virtual ~ForwardHook() = default;
  virtual void before_forward() = 0;
  // The argument as the precision policy wants it.
  virtual at::Tensor input(const at::Tensor& argument) = 0;
  virtual void after_forward(const std::vector<at::Tensor>& outputs) = 0;
  // Errors: ConfigError, naming `call`, where the module's parameters are not whole between steps.
  virtual void check_whole(const char* call) const = 0;
  // In place of after_forward when the forward threw.
  virtual void forward_failed() noexcept = 0;
};

// The place in a module where a hook can be hung. Found by dynamic_cast from torch::nn::Module.
class HookPoint {
 public:
  virtual ~HookPoint() = default;
  ForwardHook* forward_hook() const { return forward_hook_; }
  // Null removes it. Not owned.
  void set_forward_hook(ForwardHook* hook) { forward_hook_ = hook; }

 private:
  ForwardHook* forward_hook_ = nullptr;
};

namespace detail {

template <typename T>
decltype(auto) hooked_argument(ForwardHook& hook, T&& argument) {
  if constexpr (std::is_same_v<std::decay_t<T>, at::Tensor>) {
    return hook.input(argument);
  } else {
    return std::forward<T>(argument);
  }
}

// Runs `forward` between the hook's calls.
template <typename Forward>
auto run_hooked(ForwardHook& hook, Forward forward) {
  struct Guard {
    ForwardHook* hook;
    ~Guard() {
      if (hook != nullptr) hook->forward_failed();
    }
  };
  hook.before_forward();
  Guard guard{&hook};
  auto result = forward();
  std::vector<at::Tensor> outputs;
  ForwardResult<decltype(result)>::visit(result, [&](at::Tensor& t) { outputs.push_back(t); });
  hook.after_forward(outputs);
  guard.hook = nullptr;
  return result;
}

template <typename Signature>
struct IsForward : std::false_type {};
template <typename C, typename R, typename... A>
struct IsForward<R (C::*)(A...)> : std::true_type {};
template <typename C, typename R, typename... A>
struct IsForward<R (C::*)(A...) const> : std::true_type {};

template <typename Impl, typename = void>
struct HasOneForward : std::false_type {};
template <typename Impl>
struct HasOneForward<Impl, std::void_t<decltype(&Impl::forward)>>
    : IsForward<decltype(&Impl::forward)> {};

// Whether forward can be called with the first `I...` of its argument types A.
template <typename Impl, typename Arguments, typename Indices, typename = void>
struct CallableWith : std::false_type {};
template <typename Impl, typename Arguments, size_t... I>
struct CallableWith<Impl, Arguments, std::index_sequence<I...>,
                    std::void_t<decltype(std::declval<Impl&>().forward(
                        std::declval<std::tuple_element_t<I, Arguments>>()...))>> : std::true_type {
};
template <typename Impl, typename... A>
constexpr bool has_default_arguments() {
  if constexpr (sizeof...(A) == 0) {
    return false;
  } else {
    return CallableWith<Impl, std::tuple<A...>, std::make_index_sequence<sizeof...(A) - 1>>::value;
  }
}

// The forward of Hooked: with Impl's exact signature, so that Sequential and AnyModule can take its
// address, or, where Impl::forward has default arguments (which a signature does not carry), as a
// template.
template <typename Impl, bool kHasDefaults, typename R, typename... A>
struct HookedForward : Impl, HookPoint {
  using Impl::Impl;
  explicit HookedForward(const Impl& impl) : Impl(impl) {}

  R forward(A... arguments) {
    ForwardHook* hook = forward_hook();
    if (hook == nullptr) return Impl::forward(std::forward<A>(arguments)...);
    return run_hooked(*hook, [&]() -> R {
      return Impl::forward(hooked_argument(*hook, std::forward<A>(arguments))...);
    });
  }
};

template <typename Impl, typename R, typename... A>
struct HookedForward<Impl, true, R, A...> : Impl, HookPoint {
  using Impl::Impl;
  explicit HookedForward(const Impl& impl) : Impl(impl) {}

  template <typename... Given>
  auto forward(Given&&... arguments)
      -> decltype(std::declval<Impl&>().forward(std::forward<Given>(arguments)...)) {
    ForwardHook* hook = forward_hook();
    if (hook == nullptr) return Impl::forward(std::forward<Given>(arguments)...);
    return run_hooked(*hook, [&]() -> R {
      return Impl::forward(hooked_argument(*hook, std::forward<Given>(arguments))...);
    });
  }
};

template <typename Impl, typename Signature>
struct HookedBase;
template <typename Impl, typename C, typename R, typename... A>
struct HookedBase<Impl, R (C::*)(A...)> {
  using type = HookedForward<Impl, has_default_arguments<Impl, A...>(), R, A...>;
};
template <typename Impl, typename C, typename R, typename... A>
struct HookedBase<Impl, R (C::*)(A...) const> {
  using type = HookedForward<Impl, has_default_arguments<Impl, A...>(), R, A...>;
};

}  // namespace detail

template <typename Impl>
struct Hooked : detail::HookedBase<Impl, decltype(&Impl::forward)>::type {
  using Base = typename detail::HookedBase<Impl, decltype(&Impl::forward)>::type;
  using Base::Base;
  explicit Hooked(const Impl& impl) : Base(impl) {}

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    TESSERA_CHECK_CONFIG(
        this->forward_hook() == nullptr, "clone() of a module of type ", this->name(),
        " that parallelize() has taken over: its parameters are not whole. Clone the model before "
        "parallelize().");
    auto copy = std::dynamic_pointer_cast<Impl>(Impl::clone(device));
    TESSERA_CHECK(copy != nullptr, "clone() of ", this->name(), " gave another type.");
    return std::make_shared<Hooked>(static_cast<const Impl&>(*copy));
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    if (this->forward_hook() != nullptr) this->forward_hook()->check_whole("torch::save");
    Impl::save(archive);
  }
};

}  // namespace engine
}  // namespace tessera

#define TESSERA_MODULE(Name)                                                               \
  static_assert(::tessera::engine::detail::HasOneForward<Name##Impl>::value,               \
                "TESSERA_MODULE(" #Name ") needs one forward: " #Name                      \
                "Impl::forward is missing, overloaded or a template, and its hook cannot " \
                "know which one to wrap");                                                 \
  class Name : public torch::nn::ModuleHolder<::tessera::engine::Hooked<Name##Impl>> {     \
   public:                                                                                 \
    using torch::nn::ModuleHolder<::tessera::engine::Hooked<Name##Impl>>::ModuleHolder;    \
    using Impl [[maybe_unused]] = ::tessera::engine::Hooked<Name##Impl>;                   \
    /* In place of the base's, whose return type is void for a forward with defaults. */   \
    template <typename... Args>                                                            \
    auto operator()(Args&&... args) {                                                      \
      return this->get()->forward(::std::forward<Args>(args)...);                          \
    }                                                                                      \
  }

#endif  // ENGINE_MODULE_HOOK_H_
