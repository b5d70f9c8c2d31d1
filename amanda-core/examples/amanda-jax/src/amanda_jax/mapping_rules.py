"""x"""
import amanda
def standard(context): 
    context["op_type"]=context.get_op().__name__
