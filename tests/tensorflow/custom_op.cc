/* An operator that TensorFlow does not have: twice its input. It uses the stable C interface only,
 * which compiles in a moment and is the same in all versions. */
#include <cstdint>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"

static void twice(void* kernel, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* input = nullptr;
  TF_GetInput(context, 0, &input, status);
  int64_t dims[8];
  for (int i = 0; i < TF_NumDims(input); ++i) dims[i] = TF_Dim(input, i);
  int64_t count = TF_TensorElementCount(input);
  TF_Tensor* output = TF_AllocateOutput(context, 0, TF_DOUBLE, dims, TF_NumDims(input),
                                        count * sizeof(double), status);
  const double* from = static_cast<const double*>(TF_TensorData(input));
  double* to = static_cast<double*>(TF_TensorData(output));
  for (int64_t i = 0; i < count; ++i) to[i] = 2 * from[i];
  TF_DeleteTensor(output);
  TF_DeleteTensor(input);
  TF_DeleteStatus(status);
}

static void same_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

__attribute__((constructor)) static void register_twice(void) {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("AmandaTwice");
  TF_OpDefinitionBuilderAddInput(op, "tensor: double");
  TF_OpDefinitionBuilderAddOutput(op, "result: double");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, same_shape);
  TF_RegisterOpDefinition(op, status);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder("AmandaTwice", "CPU", nullptr, twice, nullptr);
  TF_RegisterKernelBuilder("AmandaTwice", kernel, status);
  TF_DeleteStatus(status);
}
