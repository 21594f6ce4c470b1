// A simulated accelerator: torch's PrivateUse1 device on host memory. See fakegpu.py.
//
// Every kernel of the device is a boxed fallback. It refuses tensors of other devices as CUDA does, gives the kernel of
// the CPU aliases of the device's memory, and returns the results as tensors of the device. It counts what CUDA would
// launch, and reports what would make the host wait.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {
using at::Tensor;
using torch::jit::Stack;
using Optional = std::optional<Tensor>;
constexpr auto kFake = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kFake, 0);

void waits(const std::string& kind, const std::string& name);  // counts a wait of the host

// ---- memory, guard, hooks ----------------------------------------------------------------------------------------
struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::malloc(n) : nullptr;
    if (p) std::memset(p, 0xFF, n);  // NaN: what is read before it is written shows
    return {p, p, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
FakeAllocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator);

struct PinnedAllocator final : c10::Allocator {  // host memory that the device copies in the background
  static inline std::mutex lock;
  static inline std::map<const void*, size_t> sizes;

  static void release(void* p) {
    std::lock_guard<std::mutex> guard(lock);
    sizes.erase(p);
    std::free(p);
  }
  static bool owns(const void* p) {
    std::lock_guard<std::mutex> guard(lock);
    auto next = sizes.upper_bound(p);
    if (next == sizes.begin()) return false;
    auto [start, size] = *std::prev(next);
    return static_cast<const char*>(p) < static_cast<const char*>(start) + size;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::malloc(n) : nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (p) sizes[p] = n;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
PinnedAllocator pinnedAllocator;

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { waits("event", "synchronize"); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

at::Generator& hostGenerator() {  // what the CPU kernels draw from for the device
  static at::Generator g = at::detail::createCPUGenerator(0);
  return g;
}
struct FakeGenerator final : at::CPUGeneratorImpl {
  FakeGenerator() {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinnedAllocator; }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::owns(p); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator g = at::make_generator<FakeGenerator>();
    return g;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<FakeGenerator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto fresh = allocator.allocate(n);
    std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

// ---- counters and graphs -----------------------------------------------------------------------------------------
std::mutex lock;
std::map<std::string, int64_t> launches;  // kernels by operator
std::atomic<bool> counting{false}, capturing{false};
PyObject* callback = nullptr;  // (kind, operator), at each wait
struct Graph {
  std::vector<std::function<void()>> calls;  // what a replay does again, with the same memory
};
std::shared_ptr<Graph> current;

void launched(const std::string& name) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(lock);
  launches[name]++;
}
void waits(const std::string& kind, const std::string& name) {
  TORCH_CHECK(!capturing, "operation not permitted when stream is capturing: ", kind, " in ", name);
  if (!counting || !callback) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(callback)(kind, name);
}

// ---- the device's tensors as the CPU's, and back -----------------------------------------------------------------
struct Aliases {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // of the CPU, of the device

  Tensor of(const Tensor& t) {
    if (t.is_sparse()) {
      auto s = at::_sparse_coo_tensor_unsafe(of(t._indices()), of(t._values()), t.sizes(), std::nullopt,
                                             std::nullopt, std::nullopt, std::nullopt, t.is_coalesced());
      pairs.emplace_back(s, t);
      return s;
    }
    for (auto& [mine, theirs] : pairs)
      if (theirs.is_same(t)) return mine;
    auto* held = new c10::Storage(t.storage());
    c10::DataPtr data(held->unsafeGetStorageImpl()->mutable_data(), held,
                      [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::Device(c10::kCPU));
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), held->nbytes(),
                                                               std::move(data), c10::GetCPUAllocator(), true));
    const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(alias, t);
    return alias;
  }

  static Tensor wrap(const c10::Storage& storage, const Tensor& like) {
    auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

  static Tensor moved(const Tensor& t) {  // a result of its own: its memory becomes the device's
    if (t.is_sparse())
      return at::_sparse_coo_tensor_unsafe(moved(t._indices()), moved(t._values()), t.sizes(), std::nullopt,
                                           std::nullopt, std::nullopt, std::nullopt, t.is_coalesced());
    auto* held = new c10::Storage(t.storage());
    c10::DataPtr data(held->unsafeGetStorageImpl()->mutable_data(), held,
                      [](void* p) { delete static_cast<c10::Storage*>(p); }, kDevice);
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), held->nbytes(),
                                                               std::move(data), &allocator, true));
    return wrap(storage, t);
  }

  bool is_view(const Tensor& t) const {
    if (t.is_sparse()) return false;
    for (auto& [mine, theirs] : pairs)
      if (!mine.is_sparse() && mine.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) return true;
    return false;
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || t.device().type() != c10::kCPU) return t;
    for (auto& [mine, theirs] : pairs)
      if (mine.is_same(t)) return theirs;
    if (!t.is_sparse())
      for (auto& [mine, theirs] : pairs)
        if (!mine.is_sparse() && mine.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl())
          return wrap(theirs.storage(), t);
    return moved(t);
  }

  void write_back() {  // what was resized, and sparse tensors that were given other parts
    for (auto& [mine, theirs] : pairs) {
      if (mine.is_sparse()) {
        auto* impl = static_cast<at::SparseTensorImpl*>(theirs.unsafeGetTensorImpl());
        auto* own = static_cast<at::SparseTensorImpl*>(mine.unsafeGetTensorImpl());
        bool changed = !back(own->indices()).is_same(impl->indices()) || !back(own->values()).is_same(impl->values());
        if (changed) {
          impl->raw_resize_(own->sparse_dim(), own->dense_dim(), mine.sizes());
          impl->set_indices_and_values_unsafe(back(own->indices()), back(own->values()));
        }
        impl->set_coalesced(own->coalesced());
        continue;
      }
      if (mine.sizes() == theirs.sizes() && mine.strides() == theirs.strides() &&
          mine.storage().data() == theirs.storage().data())
        continue;
      if (mine.storage().data() != theirs.storage().data()) {
        auto fresh = moved(mine);
        theirs.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
            std::move(fresh.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
        theirs.storage().unsafeGetStorageImpl()->set_nbytes(mine.storage().nbytes());
      }
      theirs.unsafeGetTensorImpl()->set_sizes_and_strides(mine.sizes(), mine.strides(), mine.storage_offset());
    }
  }
};

// What CUDA takes beside its own: 0-dim tensors of the CPU where TensorIterator reads them, and indices.
const std::set<std::string> takes_scalars = {
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "atan2", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "minimum",
    "maximum", "fmin", "fmax", "where", "addcmul", "addcdiv", "clamp", "clamp_min", "clamp_max", "masked_fill_",
    "masked_fill", "fill_", "index", "_index_put_impl_", "index_put_", "index_fill_", "index_fill", "hypot", "xlogy",
    "_foreach_mul_", "_foreach_add_", "_foreach_mul", "_foreach_add", "_foreach_div_", "_foreach_div"};
const std::set<std::string> takes_indices = {"index", "_index_put_impl_", "index_put_"};
// What waits for the device inside its CUDA kernel.
const std::set<std::string> waiting = {
    "nonzero", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "masked_select", "bincount",
    "equal", "_coalesce", "histc"};

// What waits only for some arguments. `index` comes here after its masks and its indices of the host were converted.
void waits_by_arguments(const std::string& name, const std::vector<c10::IValue>& arguments) {
  if (name == "repeat_interleave" && arguments.back().isNone()) waits(name, name);  // for the size of its result
  if (name != "_index_put_impl_") return;
  int64_t given = 0, masks = 0;
  for (const Optional& index : arguments[1].toOptionalTensorVector()) {
    if (!index || !index->defined()) continue;
    given++;
    masks += index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    if (index->device().type() == c10::kCPU) waits("h2d", name);
  }
  // `x[mask] = number` is `masked_fill_` on CUDA, where the number stays on the host; here Python puts it on the device.
  const bool is_one_number = arguments[2].toTensor().dim() == 0 && !arguments[3].toBool();
  if (masks && !(given == 1 && masks == 1 && is_one_number)) waits("nonzero", name);
}

// Brings a result to where it was when the graph was recorded.
void refill(const c10::IValue& then, const c10::IValue& now) {
  if (now.isTensorList()) {
    const auto to = then.toTensorVector(), from = now.toTensorVector();
    for (size_t k = 0; k < to.size(); k++) refill(to[k], from[k]);
  } else if (now.isTensor() && now.toTensor().defined() && !now.toTensor().is_same(then.toTensor())) {
    then.toTensor().copy_(now.toTensor());
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  if (counting) waits_by_arguments(name, {stack->begin() + first, stack->end()});
  Aliases aliases;
  bool writes = false;
  auto converted = [&](const Tensor& t, bool is_index) -> Tensor {
    if (!t.defined() || t.device().type() == c10::kMeta) return t;
    if (t.device().type() == kFake) return aliases.of(t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    bool allowed = (t.dim() == 0 && takes_scalars.count(name)) || (is_index && takes_indices.count(name));
    TORCH_CHECK(allowed, "Expected all tensors to be on the same device, but found at least two devices, ", kDevice,
                " and ", t.device(), "! (", name, ", a CPU tensor of shape ", t.sizes(), ")");
    return t;
  };
  for (size_t k = 0; k < count; k++) {
    auto& value = (*stack)[first + k];
    const auto& argument = schema.arguments()[k];
    if (argument.alias_info() && argument.alias_info()->isWrite()) writes = true;
    if (value.isTensor()) {
      value = converted(value.toTensor(), false);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(converted(t, false));
      value = c10::IValue(c10::List<Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<Optional> list;
      for (const Optional& t : value.toOptionalTensorVector())
        list.push_back(t ? Optional(converted(*t, true)) : std::nullopt);
      value = c10::IValue(list);
    } else if (value.isDevice() && value.toDevice().type() == kFake) {
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (argument.name() == "generator") {
      value = c10::IValue(hostGenerator());
    }
  }
  if (waiting.count(name)) waits(name, name);
  Stack inputs(stack->begin() + first, stack->end());
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  aliases.write_back();
  const size_t results = schema.returns().size(), start = stack->size() - results;
  Stack outputs(stack->begin() + start, stack->end());
  bool only_views = results > 0 && !writes;
  for (size_t k = start; k < stack->size(); k++) {
    auto& value = (*stack)[k];
    if (value.isTensor()) {
      only_views = only_views && value.toTensor().defined() && aliases.is_view(value.toTensor());
      value = aliases.back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) {
        only_views = only_views && aliases.is_view(t);
        list.push_back(aliases.back(t));
      }
      value = c10::IValue(c10::List<Tensor>(list));
    }
  }
  if (only_views) return;
  launched(name);
  if (capturing)
    current->calls.push_back([op, inputs, outputs]() {
      Stack again = inputs;
      op.callBoxed(&again);
      for (size_t k = 0; k < outputs.size(); k++) refill(outputs[k], again[again.size() - outputs.size() + k]);
    });
}

// ---- operators of the device itself ------------------------------------------------------------------------------
void forget(c10::Storage memory) {  // another tensor of the graph may have had it
  if (!capturing) return;
  current->calls.push_back([memory]() { std::memset(memory.unsafeGetStorageImpl()->mutable_data(), 0xff, memory.nbytes()); });
}
Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto fresh = at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
  forget(fresh.storage());
  return fresh;
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto fresh = at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
  forget(fresh.storage());
  return fresh;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const bool from = self.device().type() == kFake, to = dst.device().type() == kFake;
  const bool in_background = non_blocking && (from ? dst : self).is_pinned();
  const auto kind = std::string(from ? "d2h" : "h2d") + (in_background ? "_async" : "");
  Aliases aliases;
  Tensor source = from ? aliases.of(self) : self, target = to ? aliases.of(dst) : dst;
  if (from && to) {
    launched("copy_");
  } else if (self.numel()) {
    waits(kind, "copy_");
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  target.copy_(source);
  if (capturing) current->calls.push_back([target, source]() { target.copy_(source); });
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  waits("item", "_local_scalar_dense");
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = (impl->numel() + impl->storage_offset()) * self.dtype().itemsize();
  if (bytes > self.storage().nbytes()) FakeHooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}
Tensor& set_source(Tensor& self, at::Storage storage) {
  const int64_t n = storage.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes();
}
Tensor convolution(const Tensor& x, const Tensor& w, const Optional& b, c10::IntArrayRef stride,
                   c10::IntArrayRef pad, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef out_pad,
                   int64_t groups) {
  TORCH_CHECK(x.device() == w.device() && (!b || !b->defined() || b->device() == x.device()),
              "Expected all tensors to be on the same device (convolution)");
  launched("convolution");
  Aliases aliases;
  auto bias = b && b->defined() ? Optional(aliases.of(*b)) : std::nullopt;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto again = [=, x = aliases.of(x), w = aliases.of(w), stride = stride.vec(), pad = pad.vec(),
                dilation = dilation.vec(), out_pad = out_pad.vec()]() {
    return at::convolution(x, w, bias, stride, pad, dilation, transposed, out_pad, groups);
  };
  auto y = again();
  if (capturing) current->calls.push_back([again, y]() { y.copy_(again()); });
  return Aliases::moved(y);
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
                                                        c10::IntArrayRef stride, c10::IntArrayRef pad,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef out_pad, int64_t groups,
                                                        std::array<bool, 3> mask) {
  for (bool wanted : mask)
    if (wanted) launched("convolution_backward");
  Aliases aliases;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto again = [=, g = aliases.of(g), x = aliases.of(x), w = aliases.of(w), stride = stride.vec(), pad = pad.vec(),
                dilation = dilation.vec(), out_pad = out_pad.vec()]() {
    const c10::IntArrayRef bias{w.size(0)};
    return at::convolution_backward(g, x, w, bias, stride, pad, dilation, transposed, out_pad, groups, mask);
  };
  auto found = again();
  if (capturing)
    current->calls.push_back([again, found]() {
      auto now = again();
      if (std::get<0>(now).defined()) std::get<0>(found).copy_(std::get<0>(now));
      if (std::get<1>(now).defined()) std::get<1>(found).copy_(std::get<1>(now));
      if (std::get<2>(now).defined()) std::get<2>(found).copy_(std::get<2>(now));
    });
  auto [a, b, c] = found;
  auto up = [](const Tensor& t) { return t.defined() ? Aliases::moved(t) : t; };
  return {up(a), up(b), up(c)};
}
// torch's own LSTM and GRU take these cells on accelerators (cuDNN's whole layer on CUDA): one launch each.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& ig, const Tensor& hg, const Tensor& cx,
                                             const Optional& ib, const Optional& hb) {
  launched("_thnn_fused_lstm_cell");
  Aliases a;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto gates = a.of(ig) + a.of(hg);
  if (ib && ib->defined()) gates = gates + a.of(*ib) + a.of(*hb);
  auto c = gates.chunk(4, 1);
  auto i = c[0].sigmoid(), f = c[1].sigmoid(), g = c[2].tanh(), o = c[3].sigmoid();
  auto cy = f * a.of(cx) + i * g;
  return {Aliases::moved(o * cy.tanh()), Aliases::moved(cy), Aliases::moved(at::cat({i, f, g, o}, 1))};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& ghy, const Optional& gcy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& ws, bool bias) {
  launched("_thnn_fused_lstm_cell_backward");
  if (!(ghy && ghy->defined()) && !(gcy && gcy->defined())) return {};
  Aliases a;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto t = a.of(cy).tanh();
  auto gh = ghy && ghy->defined() ? a.of(*ghy) : at::zeros_like(t);
  auto gc = gcy && gcy->defined() ? a.of(*gcy) : at::zeros_like(t);
  auto c = a.of(ws).chunk(4, 1);
  auto i = c[0], f = c[1], g = c[2], o = c[3];
  gc = gc + gh * o * (1 - t * t);
  auto di = gc * g * i * (1 - i), df = gc * a.of(cx) * f * (1 - f);
  auto gates = at::cat({di, df, gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {Aliases::moved(gates), Aliases::moved(gc * f), bias ? Aliases::moved(gates.sum(0)) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& ig, const Tensor& hg, const Tensor& hx, const Optional& ib,
                                    const Optional& hb) {
  launched("_thnn_fused_gru_cell");
  Aliases a;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto x = a.of(ig), h = a.of(hg);
  if (ib && ib->defined()) x = x + a.of(*ib), h = h + a.of(*hb);
  auto xs = x.chunk(3, 1), hs = h.chunk(3, 1);
  auto r = (xs[0] + hs[0]).sigmoid(), z = (xs[1] + hs[1]).sigmoid(), n = (xs[2] + r * hs[2]).tanh();
  return {Aliases::moved(n + z * (a.of(hx) - n)), Aliases::moved(at::cat({r, z, n, a.of(hx), hs[2]}, 1))};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& ghy, const Tensor& ws, bool bias) {
  launched("_thnn_fused_gru_cell_backward");
  Aliases a;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto c = a.of(ws).chunk(5, 1);
  auto r = c[0], z = c[1], n = c[2], hx = c[3], hn = c[4], g = a.of(ghy);
  auto gn = g * (1 - z) * (1 - n * n), gz = g * (hx - n) * z * (1 - z), gr = gn * hn * r * (1 - r);
  auto gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  auto sum = [&](const Tensor& t) { return bias ? Aliases::moved(t.sum(0)) : Tensor(); };
  auto s1 = sum(gi), s2 = sum(gh);
  return {Aliases::moved(gi), Aliases::moved(gh), Aliases::moved(g * z), s1, s2};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("is_set_to", &is_set_to);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())  // CUDA takes many tensors in one launch
    if (name.name.rfind("aten::_foreach_", 0) == 0 || name.name.rfind("aten::_fused_ada", 0) == 0) {
      std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // torch's lists for CUDA
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGH(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(HIGH)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_PROMOTE(PROMOTE)
}
struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new FakeHooks()); }
} registered;
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](py::object function) {
    launches.clear();
    Py_XDECREF(callback);
    callback = function.release().ptr();
    counting = true;
  });
  m.def("stop", []() { counting = false; return launches; });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph");
  m.def("begin_capture", []() { current = std::make_shared<Graph>(); capturing = true; });
  m.def("end_capture", []() { capturing = false; return std::move(current); });
  m.def("replay", [](const Graph& graph) {
    py::gil_scoped_release released;
    at::AutoDispatchBelowADInplaceOrView guard;
    for (const auto& call : graph.calls) call();
    launched("graph");
  });
  m.def("seed", [](uint64_t n) { hostGenerator().set_current_seed(n); });
}
